// The page: choosing an image and plans, asking the server, showing what it answers.

import { onTheme } from "./drawing.js";
import { PlanCard } from "./plans.js";
import { setPeople, showCost, showSays } from "./results.js";
import { element, get, link, post, question, readLink, state, updateLink, upload } from "./state.js";

const find = (id) => document.getElementById(id);
const MEASURE_AFTER = 350; // milliseconds without a change
let setup, cards = [], result = null, timing = null, images = {};

// --- messages

function say(words, bad = false) {
  const status = find("status");
  status.textContent = words;
  status.hidden = !words;
  status.classList.toggle("bad", bad);
}

async function guarded(work) {
  try {
    return await work();
  } catch (error) {
    if (error.name !== "AbortError") say(error.message, true);
    return undefined;
  }
}

// --- a model

async function open(wanted) {
  say("Loading the model …");
  setup = await get(`/api/setup?model=${encodeURIComponent(wanted.model)}`);
  say(setup.notes.join("; "));
  state.model = setup.model;
  find("model").replaceChildren(...setup.models.map((name) => element("option", { value: name, textContent: name })));
  find("model").value = setup.model;
  find("batch").replaceChildren(...setup.batches.map((count) => element("option", { value: String(count), textContent: String(count) })));
  state.batch = setup.batches.includes(wanted.batch) ? wanted.batch : setup.kind === "texts" ? 8 : 1;
  find("batch").value = String(state.batch);
  setPeople(setup.model, setup.slots[0]);
  const known = setup.samples.find((sample) => sample.number === wanted.sample) ?? setup.samples[0];
  find("prompt-field").hidden = !setup.prompt_label;
  find("prompt-label").textContent = setup.prompt_label + (setup.kind === "texts" && !setup.samples[0].prompt ? " (none: the classes it knows)" : "");
  find("prompt").maxLength = setup.max_prompt;
  find("prompt").placeholder = setup.kind === "texts" ? "a red circle\na photo of a dog" : "What colour is the bar?";
  makeDrops();
  makeSamples();
  makeCards(wanted.plans.length ? wanted.plans : [setup.plan]);
  await chooseSample(known, wanted.prompt ?? null);
}

function makeCards(plans) {
  state.plans = plans;
  cards = plans.map((text, number) => {
    const card = new PlanCard("AB"[number], setup, changed, () => removePlan(number));
    card.text.value = text;
    card.find(".remove").hidden = plans.length < 2;
    card.alone = plans.length < 2;
    return card;
  });
  const add = cards[0].find(".add");
  add.hidden = plans.length === 2;
  add.addEventListener("click", addPlan);
  const plansRoot = find("plans");
  plansRoot.replaceChildren(...cards.map((card) => card.root));
  plansRoot.classList.toggle("two", plans.length === 2);
}

// The second plan is the same place and budget, chosen at random: the control that a method should beat.
function addPlan() {
  const [first] = state.plans, where = first.match(/^[a-z0-9_]+(@[^(+]*)/)?.[1] ?? ":25%";
  makeCards([first, first.startsWith("random") ? setup.plan : `random${where}`]);
  cards[1].text.focus();
  changed();
}

function removePlan(number) {
  makeCards(state.plans.filter((_, other) => other !== number));
  cards[0].text.focus();
  changed();
}

// --- an image

function makeDrops() {
  find("drops").replaceChildren(
    ...setup.slots.map((slot) => {
      const input = element("input", { type: "file", accept: "image/*" });
      const single = setup.slots.length === 1;
      input.setAttribute("aria-label", single ? "Choose an image file" : `Choose the ${slot} image`);
      const words = single ? "Drop, paste or choose an image" : "Drop or choose";
      const drop = element("label", { className: "drop" }, input, element("strong", { textContent: single ? "Your image" : slot }), element("span", { textContent: words }));
      drop.dataset.slot = slot;
      input.addEventListener("change", () => input.files[0] && guarded(() => chooseFile(input.files[0], slot)));
      drop.addEventListener("dragover", (event) => (event.preventDefault(), drop.classList.add("over")));
      drop.addEventListener("dragleave", () => drop.classList.remove("over"));
      drop.addEventListener("drop", (event) => {
        event.preventDefault();
        drop.classList.remove("over");
        if (event.dataTransfer.files[0]) guarded(() => chooseFile(event.dataTransfer.files[0], slot));
      });
      return drop;
    }),
  );
}

function makeSamples() {
  find("samples").classList.toggle("tall", setup.kind === "people");
  find("samples").replaceChildren(
    ...setup.samples.map((sample, number) => {
      const image = element("img", { src: sampleAddress(sample.number, setup.slots[0]), alt: "", loading: "lazy" });
      const button = element("button", { type: "button" }, image);
      button.setAttribute("aria-label", `Sample ${number + 1}`);
      button.dataset.number = String(sample.number);
      button.addEventListener("click", () => guarded(() => chooseSample(sample)));
      return button;
    }),
  );
}

function sampleAddress(number, slot) {
  return `/api/sample?${new URLSearchParams({ model: state.model, number, slot })}`;
}

async function loadImages(addresses) {
  const loaded = {};
  for (const [slot, address] of Object.entries(addresses)) {
    const image = new Image();
    image.src = address;
    await image.decode();
    loaded[slot] = image;
  }
  return loaded;
}

async function chooseSample(sample, prompt = null) {
  images = await loadImages(Object.fromEntries(setup.slots.map((slot) => [slot, sampleAddress(sample.number, slot)])));
  state.sample = sample.number;
  state.images = Object.fromEntries(setup.slots.map((slot) => [slot, `sample:${sample.number}`]));
  state.files = {};
  const isOwn = setup.kind === "question" || state.prompt === null || prompt !== null;
  if (isOwn) setPrompt(prompt ?? sample.prompt);
  showChosen();
  await run();
}

async function chooseFile(file, slot) {
  if (file.size > setup.max_upload) throw new Error(`${file.name} has ${(file.size / 1e6).toFixed(0)} MB; at most ${setup.max_upload / 1e6} MB`);
  say(`Reading ${file.name} …`);
  const answer = await upload(file);
  const loaded = await loadImages({ [slot]: `/api/images/${answer.image}` });
  say("");
  const alone = state.sample !== null;
  images = alone ? loaded : { ...images, ...loaded };
  state.images = { ...(alone ? {} : state.images), [slot]: answer.image };
  state.files = { ...(alone ? {} : state.files), [slot]: file.name };
  state.sample = null;
  showChosen();
  await run();
}

function setPrompt(text) {
  state.prompt = text;
  find("prompt").value = text;
}

function showChosen() {
  for (const button of find("samples").children) button.setAttribute("aria-pressed", String(Number(button.dataset.number) === state.sample && state.sample !== null));
  for (const drop of find("drops").children) {
    const name = state.files[drop.dataset.slot];
    drop.classList.toggle("chosen", Boolean(name));
    drop.lastChild.textContent = name ?? (setup.slots.length === 1 ? "Drop, paste or choose an image" : "Drop or choose");
    drop.firstChild.value = "";
  }
}

// --- asking

let running = false, again = false, measuring = null, waiting = null;

function changed() {
  state.plans = cards.map((card) => card.value);
  return guarded(run);
}

// Asks for the newest settings; while an answer is under way, remembers that there are newer ones.
async function run() {
  updateLink();
  clearTimeout(waiting);
  measuring?.abort();
  if (running) {
    again = true;
    return;
  }
  running = true;
  document.body.classList.add("busy");
  try {
    do {
      again = false;
      const asked = question(), shown = images;
      try {
        const answer = await (await post("/api/run", asked)).json();
        if (again && asked.model !== state.model) continue;
        if (answer.plans.length !== cards.length) continue;
        result = answer;
        timing = null;
        find("status").classList.contains("bad") && say("");
        show(shown);
      } catch (error) {
        if (!again) throw error; // what is wrong with older settings is not said
      }
    } while (again);
  } finally {
    running = false;
    document.body.classList.remove("busy");
  }
  waiting = setTimeout(() => guarded(measure), MEASURE_AFTER);
}

function show(shown) {
  result.plans.forEach((plan, number) => cards[number].show(plan, shown));
  showSays(find("says"), result);
  showCost(find("cost"), find("cost-note"), result, timing);
  find("command").textContent = result.code?.command ?? "";
  find("python").textContent = result.code?.python ?? "";
  for (const id of ["copy-command", "copy-python", "save"]) find(id).disabled = !result.code;
  document.body.dataset.shown = JSON.stringify([state.model, state.images, state.prompt, state.plans]);
}

async function measure() {
  measuring = new AbortController();
  const response = await post("/api/measure", { ...question(), batch: state.batch }, measuring.signal);
  const measured = await response.json();
  if (measuring.signal.aborted) return;
  timing = measured;
  showCost(find("cost"), find("cost-note"), result, timing);
}

// --- taking it away

async function copy(words, what) {
  try {
    await navigator.clipboard.writeText(words);
    took(`${what} copied.`);
  } catch {
    find("code").open = true;
    took("The browser does not allow copying: select the text below.");
  }
}

function took(words) {
  find("took").textContent = words;
}

async function save() {
  took("Drawing …");
  const body = question();
  body.plans = body.plans.filter((_, number) => !result.plans[number].error);
  const picture = await (await post("/api/picture", body)).blob();
  const address = URL.createObjectURL(picture);
  const name = `${result.title.replace(/[^\w.-]+/g, "-")}-${body.plans[0].replace(/[^\w.@-]+/g, "-")}.png`.slice(0, 120);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
  took(`Saved ${name}.`);
}

// --- start

find("model").addEventListener("change", (event) => {
  Object.assign(state, { sample: null, prompt: null });
  guarded(() => open({ model: event.target.value, plans: [], sample: null, prompt: null, batch: null }));
});
let typing;
find("prompt").addEventListener("input", () => {
  state.prompt = find("prompt").value;
  clearTimeout(typing);
  typing = setTimeout(changed, 450);
});
find("batch").addEventListener("change", () => {
  state.batch = Number(find("batch").value);
  updateLink();
  timing = null;
  showCost(find("cost"), find("cost-note"), result, timing);
  measuring?.abort();
  guarded(measure);
});
find("copy-link").addEventListener("click", () => copy(link(), state.sample === null ? "Link (without your image, which stays here)" : "Link"));
find("copy-command").addEventListener("click", () => copy(result.code.command, "Command"));
find("copy-python").addEventListener("click", () => copy(result.code.python, "Python lines"));
find("save").addEventListener("click", () => guarded(save));
addEventListener("paste", (event) => {
  const file = [...(event.clipboardData?.files ?? [])].find((one) => one.type.startsWith("image/"));
  if (file && setup) guarded(() => chooseFile(file, setup.slots[0]));
});
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
// A plain link would put its name where the page's own link is, and so open the page anew.
document.querySelector(".skip").addEventListener("click", (event) => (event.preventDefault(), find("plans").focus()));
addEventListener("hashchange", () => {
  Object.assign(state, { prompt: null });
  guarded(() => open(readLink()));
});
const redraw = () => result && cards.forEach((card) => card.outcome && card.showPictures());
onTheme(redraw);
new ResizeObserver(redraw).observe(find("plans"));
guarded(() => open(readLink()));
