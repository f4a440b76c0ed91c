// Pictures of one cut: the kept patches and the scores. The colours and the places of the patches come from the server.

export const GONE = 0, DROPPED = 1, MERGED = 2, PICKED = 3, ANCHOR = 4, FOLDED = 5, MIXED = 6;
const dark = matchMedia("(prefers-color-scheme: dark)");

export function isDark() {
  return dark.matches;
}

export function onTheme(change) {
  dark.addEventListener("change", change);
}

// The canvas in pixels of the screen; draws in pixels of the image.
function begin(canvas, band, most = 900) {
  const [left, right, bottom, top] = band.limits;
  const wide = right - left, high = bottom - top;
  const shown = Math.max(1, Math.min(most, canvas.clientWidth || 58) * (window.devicePixelRatio || 1));
  canvas.width = Math.round(shown);
  canvas.height = Math.max(1, Math.round((shown * high) / wide));
  canvas.style.aspectRatio = `${wide} / ${high}`;
  const context = canvas.getContext("2d");
  const scale = canvas.width / wide;
  context.setTransform(scale, 0, 0, scale, -left * scale, -top * scale);
  context.fillStyle = isDark() ? "#23272c" : "#f2f2f2";
  context.fillRect(left, top, wide, high);
  return { context, pixel: (window.devicePixelRatio || 1) / scale };
}

export function patchBox(band, patch) {
  const columns = band.grid[1], row = Math.floor(patch / columns), column = patch % columns;
  const left = band.columns[column], top = band.rows[row];
  return [left, top, band.columns[column + 1] - left, band.rows[row + 1] - top];
}

function fillPatches(context, band, patches, style) {
  context.fillStyle = style;
  for (const patch of patches) context.fillRect(...patchBox(band, patch));
}

function outline(context, band, patches, style, width, inset) {
  context.strokeStyle = style;
  context.lineWidth = width;
  for (const patch of patches) {
    const [x, y, w, h] = patchBox(band, patch);
    context.strokeRect(x + inset * w, y + inset * h, w * (1 - 2 * inset), h * (1 - 2 * inset));
  }
}

function greyImage(context, image, band, alpha) {
  context.save();
  context.filter = "grayscale(1)";
  context.globalAlpha = alpha;
  context.drawImage(image, 0, 0, ...band.size);
  context.restore();
}

function veil(context, band, pixel) {
  for (const [left, top, right, bottom] of band.unseen ?? []) {
    context.save();
    context.beginPath();
    context.rect(left, top, right - left, bottom - top);
    context.clip();
    context.fillStyle = isDark() ? "rgb(18 20 23 / 70%)" : "rgb(242 242 242 / 72%)";
    context.fillRect(left, top, right - left, bottom - top);
    context.strokeStyle = isDark() ? "#6b737c" : "#9a9a9a";
    context.lineWidth = pixel;
    context.beginPath();
    for (let x = left - (bottom - top); x < right; x += 9 * pixel) {
      context.moveTo(x, bottom);
      context.lineTo(x + (bottom - top), top);
    }
    context.stroke();
    context.restore();
  }
}

export function drawOriginal(canvas, image, band) {
  const { context, pixel } = begin(canvas, band);
  context.drawImage(image, 0, 0, ...band.size);
  if (band.grid) {
    context.strokeStyle = "rgb(255 255 255 / 45%)";
    context.lineWidth = 0.6 * pixel;
    context.beginPath();
    for (const x of band.columns) (context.moveTo(x, band.rows[0]), context.lineTo(x, band.rows.at(-1)));
    for (const y of band.rows) (context.moveTo(band.columns[0], y), context.lineTo(band.columns.at(-1), y));
    context.stroke();
  }
  veil(context, band, pixel);
}

export function jointOf(stage) {
  return stage.tints.map((tint) => tint >= 0);
}

export function drawKept(canvas, image, band, stage, colours, at = null) {
  const { context, pixel } = begin(canvas, band);
  const all = stage.states.map((_, patch) => patch), joint = jointOf(stage);
  const state = (...wanted) => all.filter((patch) => wanted.includes(stage.states[patch]));
  context.fillStyle = isDark() ? "#2b2f35" : "#dbdbdb";
  context.fillRect(0, 0, ...band.size);
  greyImage(context, image, band, 0.24);
  fillPatches(context, band, state(GONE), isDark() ? "rgb(10 11 13 / 75%)" : "rgb(140 140 140 / 75%)");
  fillPatches(context, band, state(FOLDED), `${colours.style.folded}4d`);
  const kept = stage.shares ? state(MIXED) : all.filter((patch) => stage.groups[patch] >= 0);
  context.save();
  context.beginPath();
  for (const patch of kept) context.rect(...patchBox(band, patch));
  context.clip();
  context.drawImage(image, 0, 0, ...band.size);
  context.restore();
  const thin = Math.min(1, Math.max(0.35, canvas.width / 300)) * pixel;
  for (const patch of all) if (joint[patch]) fillPatches(context, band, [patch], `${colours.tints[stage.tints[patch]]}99`);
  if (joint.some(Boolean)) {
    borders(context, band, stage, thin);
    for (const patch of all) if (joint[patch] && stage.states[patch] === PICKED) dot(context, band, patch, thin);
  }
  outline(context, band, state(PICKED).filter((patch) => !joint[patch]), colours.style.picked, 1.3 * thin, 0.05);
  outline(context, band, state(MIXED), colours.style.mixed, 1.1 * thin, 0.05);
  outline(context, band, state(ANCHOR), colours.style.anchor, 2.4 * thin, 0.09);
  veil(context, band, pixel);
  if (at !== null) cursor(context, band, stage, at, pixel);
}

function borders(context, band, stage, width) {
  const [rows, columns] = band.grid;
  context.strokeStyle = "#ffffff";
  context.lineWidth = width;
  context.beginPath();
  for (let patch = 0; patch < stage.groups.length; patch++) {
    const row = Math.floor(patch / columns), column = patch % columns;
    if (column + 1 < columns && stage.groups[patch] !== stage.groups[patch + 1]) {
      context.moveTo(band.columns[column + 1], band.rows[row]);
      context.lineTo(band.columns[column + 1], band.rows[row + 1]);
    }
    if (row + 1 < rows && stage.groups[patch] !== stage.groups[patch + columns]) {
      context.moveTo(band.columns[column], band.rows[row + 1]);
      context.lineTo(band.columns[column + 1], band.rows[row + 1]);
    }
  }
  context.stroke();
}

function dot(context, band, patch, width) {
  const [x, y, w, h] = patchBox(band, patch);
  context.beginPath();
  context.arc(x + w / 2, y + h / 2, Math.max(2 * width, Math.min(w, h) * 0.14), 0, 2 * Math.PI);
  context.fillStyle = "#1a1a1a";
  context.fill();
  context.strokeStyle = "#ffffff";
  context.lineWidth = width;
  context.stroke();
}

function cursor(context, band, stage, at, pixel) {
  const group = stage.groups[at];
  const members = group < 0 ? [at] : stage.groups.flatMap((other, patch) => (other === group ? [patch] : []));
  for (const [style, width] of [["#ffffff", 4], ["#111111", 2]]) outline(context, band, members, style, width * pixel, 0);
  outline(context, band, [at], "#ffe14d", 2 * pixel, 0.12);
}

export function drawHeat(canvas, image, band, stage, values, colours, at = null) {
  const { context, pixel } = begin(canvas, band);
  greyImage(context, image, band, 1);
  const [low, high] = rangeOf(values);
  values.forEach((value, patch) => {
    if (value === null) return fillPatches(context, band, [patch], isDark() ? "rgb(35 39 44 / 85%)" : "rgb(230 230 230 / 85%)");
    const shade = high > low ? (value - low) / (high - low) : 0.5;
    fillPatches(context, band, [patch], `${colours.heat[Math.round(shade * (colours.heat.length - 1))]}b8`);
  });
  veil(context, band, pixel);
  if (at !== null) cursor(context, band, stage, at, pixel);
}

export function rangeOf(values) {
  const finite = values.filter((value) => value !== null);
  return [Math.min(...finite), Math.max(...finite)];
}

export function drawScale(canvas, colours) {
  canvas.width = colours.heat.length;
  canvas.height = 1;
  const context = canvas.getContext("2d");
  colours.heat.forEach((colour, x) => {
    context.fillStyle = colour;
    context.fillRect(x, 0, 1, 1);
  });
}

export function patchAt(canvas, band, event) {
  if (!band.grid) return null;
  const box = canvas.getBoundingClientRect(), [left, right, bottom, top] = band.limits;
  const x = left + ((event.clientX - box.left) / box.width) * (right - left);
  const y = top + ((event.clientY - box.top) / box.height) * (bottom - top);
  const column = band.columns.findIndex((edge, number) => x >= edge && x < (band.columns[number + 1] ?? -Infinity));
  const row = band.rows.findIndex((edge, number) => y >= edge && y < (band.rows[number + 1] ?? -Infinity));
  return column < 0 || row < 0 ? null : row * band.grid[1] + column;
}

const WORDS = ["dropped at an earlier cut", "dropped", "merged", "kept", "anchor", "folded into one token", "selected and mixed"];

export function describePatch(band, stage, patch) {
  const columns = band.grid[1];
  const parts = [`row ${Math.floor(patch / columns) + 1}, column ${(patch % columns) + 1}: ${WORDS[stage.states[patch]]}`];
  const group = stage.groups[patch];
  const members = group < 0 ? 0 : stage.groups.filter((other) => other === group).length;
  if (stage.tints[patch] >= 0) parts.push(`one token of ${members} patches`);
  if (stage.scores && stage.scores[patch] !== null) parts.push(`score ${stage.scores[patch].toPrecision(3)}`);
  if (stage.shares && stage.shares[patch] !== null) parts.push(`weight ${stage.shares[patch].toPrecision(3)} %`);
  return parts.join(", ");
}

export function legendOf(bands, number, colours) {
  const stages = bands.flatMap((band) => (band.stages[number] ? [band.stages[number]] : []));
  const has = (state) => stages.some((stage) => stage.states.includes(state));
  const keys = [];
  if (has(ANCHOR)) keys.push({ label: "anchor", border: colours.style.anchor });
  if (stages.some((stage) => stage.states.some((state, patch) => state === PICKED && stage.tints[patch] < 0)))
    keys.push({ label: "kept", border: colours.style.picked });
  if (has(MIXED)) keys.push({ label: "selected and mixed", border: colours.style.mixed });
  if (has(FOLDED)) keys.push({ label: "folded into one", fill: colours.style.folded });
  if (stages.some((stage) => jointOf(stage).some(Boolean))) {
    keys.push({ label: "one colour: one token", fill: colours.tints[1] });
    keys.push({ label: "stands for its group", fill: "#1a1a1a", border: "#ffffff", dot: true });
  }
  if (has(DROPPED)) keys.push({ label: bands[0].zeroed ? "set to 0" : "dropped", fill: isDark() ? "#3a3f46" : "#cfcfcf" });
  if (has(GONE)) keys.push({ label: "dropped at an earlier cut", fill: isDark() ? "#0c0d0f" : "#8c8c8c" });
  return keys;
}
