// A plan on the page: its text, the sliders that change the text, its errors, and its pictures.

import * as drawing from "./drawing.js";
import { element } from "./state.js";

const UNITS = { share: (n) => `${n}%`, keep: (n) => `${n} tokens`, remove: (n) => `−${n} a cut`, scale: (n) => `${n}%` };

export class PlanCard {
  // change(text, settled): the text was changed, by the user.
  constructor(letter, setup, change, remove) {
    this.letter = letter;
    this.setup = setup;
    this.change = change;
    this.outcome = null;
    this.cut = null; // the number of the cut that is shown; null: the last one
    this.at = null; // the patch under the cursor
    this.root = document.getElementById("plan-template").content.firstElementChild.cloneNode(true);
    this.find = (selector) => this.root.querySelector(selector);
    this.root.classList.add(letter.toLowerCase());
    this.find("h2").textContent = `Plan ${letter}`;
    this.find(".remove").setAttribute("aria-label", `Remove plan ${letter}`);
    this.find(".remove").addEventListener("click", remove);
    this.text = this.find(".text");
    this.text.setAttribute("aria-label", `Plan ${letter}`);
    this.error = this.find(".error");
    this.error.id = `error-${letter}`;
    this.listen();
    this.fillMethods();
  }

  listen() {
    let typing;
    this.text.addEventListener("input", () => {
      clearTimeout(typing);
      typing = setTimeout(() => this.change(), 300);
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      clearTimeout(typing);
      this.change();
    });
    this.find(".method").addEventListener("change", (event) => {
      const chosen = this.setup.methods.find((method) => method.name === event.target.value);
      if (chosen) this.set(chosen.plan);
    });
    this.find(".budget").addEventListener("input", () => this.slide("budget"));
    this.find(".place").addEventListener("input", () => this.slide("place"));
    this.find(".step").addEventListener("change", () => this.showControls());
    this.find(".meant").addEventListener("click", () => {
      this.set(this.find(".meant").dataset.plan);
      this.text.focus();
    });
  }

  get value() {
    return this.text.value;
  }

  set(text) {
    this.text.value = text;
    this.change();
  }

  fillMethods() {
    const select = this.find(".method"), groups = new Map();
    select.append(element("option", { value: "", textContent: "as typed", disabled: true }));
    for (const method of this.setup.methods) {
      if (!groups.has(method.group)) groups.set(method.group, element("optgroup", { label: method.group }));
      groups.get(method.group).append(element("option", { value: method.name, textContent: method.name, title: method.summary }));
    }
    for (const name of ["of this package", "published", "controls"]) if (groups.has(name)) select.append(groups.get(name));
    const range = this.find(".place");
    range.max = Math.max(0, this.setup.places.length - 1);
  }

  // --- the text and its parts

  get step() {
    return this.outcome?.steps?.[this.stepNumber] ?? null;
  }

  get stepNumber() {
    return Number(this.find(".step").value) || 0;
  }

  slide(what) {
    const step = this.step;
    if (!step) return;
    if (what === "budget") step.budget.amount = Number(this.find(".budget").value);
    else step.place = this.setup.places[Number(this.find(".place").value)].where;
    step.text = this.compose(step, what);
    this.showValues();
    this.set(this.outcome.steps.map((one) => one.text).join(" + "));
  }

  compose(step, what) {
    const options = { ...step.options };
    if (step.budget?.kind === "scale") {
      delete options.size;
      options.scale = (step.budget.amount / 100).toFixed(2);
      return `${step.method}(${listed(options)})`;
    }
    if (what === "place") step.where = `@${step.place}`;
    if (what === "budget") {
      step.typed = true;
      for (const name of step.replaced ?? []) delete options[name];
      step.options = options;
    }
    const amount = step.budget?.amount;
    const budgets = { share: `:${amount}%`, keep: `:${amount}`, remove: `:-${amount}` };
    const budget = step.typed || /:/.test(step.text) ? (budgets[step.budget?.kind] ?? "") : "";
    const words = listed(options);
    return `${step.method}${step.where}${budget}${words ? `(${words})` : ""}`;
  }

  // --- what the server says about it

  show(outcome, images) {
    this.images = images;
    const failed = Boolean(outcome.error);
    this.root.classList.toggle("stale", failed && Boolean(this.outcome));
    this.text.setAttribute("aria-invalid", String(failed));
    this.error.hidden = !failed;
    if (failed) {
      this.text.setAttribute("aria-describedby", this.error.id);
      this.showError(outcome.error);
      this.disableControls(true);
      return;
    }
    this.text.removeAttribute("aria-describedby");
    const cuts = (one) => one?.images && Object.values(one.images)[0].stages.map((stage) => stage.layer).join();
    if (cuts(this.outcome) !== cuts(outcome)) this.cut = null;
    this.outcome = outcome;
    this.showSteps();
    this.showControls();
    this.showPictures();
  }

  showError(error) {
    const where = this.find(".where"), meant = this.find(".meant");
    where.replaceChildren();
    where.hidden = error.position === null;
    if (error.position !== null) {
      const text = this.value, at = Math.min(error.position, text.length);
      where.append(text.slice(0, at), element("mark", { textContent: text.slice(at, at + 1) || " " }), text.slice(at + 1));
    }
    this.find(".reason").textContent = error.message;
    meant.hidden = !error.meant;
    meant.textContent = `Use ${error.meant}`;
    meant.dataset.plan = error.meant;
  }

  disableControls(off) {
    for (const name of [".budget", ".place"]) this.find(name).disabled = off;
  }

  showSteps() {
    const select = this.find(".step"), before = this.stepNumber;
    select.replaceChildren(
      ...this.outcome.steps.map((step, number) => element("option", { value: String(number), textContent: `${number + 1}: ${step.method}` })),
    );
    const last = this.outcome.steps.length - 1;
    select.value = String(this.stepsBefore === this.outcome.steps.length ? Math.min(before, last) : Math.max(0, last));
    this.stepsBefore = this.outcome.steps.length;
    this.find(".step-field").hidden = last < 1;
  }

  showControls() {
    const step = this.step, budget = this.find(".budget"), place = this.find(".place");
    const only = this.outcome.steps.length === 1 ? step.method : "";
    this.find(".method").value = this.setup.methods.some((method) => method.name === only) ? only : "";
    this.find(".summary").textContent = step ? step.summary : "The model as it is, with all tokens.";
    this.disableControls(false);
    budget.disabled = !step?.budget;
    place.disabled = !step || step.budget?.kind === "scale" || this.setup.places.length < 2;
    if (step?.budget) {
      const kind = step.budget.kind, total = this.totalTokens();
      const most = { share: 100, keep: total, remove: Math.max(1, Math.floor((total - 1) / step.cuts)), scale: 100 }[kind];
      budget.min = { share: 1, keep: 1, remove: 0, scale: 20 }[kind];
      budget.max = String(Math.max(most, step.budget.amount ?? 0));
      budget.step = "1";
      if (kind === "scale" && step.budget.amount !== null && step.budget.amount <= 1) step.budget.amount = Math.round(step.budget.amount * 100);
      budget.value = String(step.budget.amount ?? most);
    }
    const number = this.setup.places.findIndex((one) => one.where === step?.place);
    if (number >= 0) place.value = String(number);
    this.showValues();
  }

  showValues() {
    const step = this.step;
    const label = this.setup.places.find((one) => one.where === step?.place)?.label;
    const budget = step?.budget ? UNITS[step.budget.kind](step.budget.amount ?? "?") : "as trained";
    const place = step?.budget?.kind === "scale" ? "the image" : (label ?? (step?.cuts > 1 ? `${step.cuts} cuts` : step?.where || "as its authors"));
    this.find(".budget-value").textContent = step ? budget : "";
    this.find(".place-value").textContent = step ? place : "";
    this.find(".budget").setAttribute("aria-valuetext", budget);
    this.find(".place").setAttribute("aria-valuetext", place);
  }

  totalTokens() {
    const band = Object.values(this.outcome.images)[0];
    return band.stages[0]?.tokens_in ?? (band.grid ? band.grid[0] * band.grid[1] : 100);
  }

  // --- pictures

  get bands() {
    return Object.entries(this.outcome.images);
  }

  get cutNumber() {
    const count = this.bands[0][1].stages.length;
    return this.cut === null ? count - 1 : Math.min(this.cut, count - 1);
  }

  showPictures() {
    this.showStrip();
    const number = this.cutNumber, [, first] = this.bands[0], stage = first.stages[number];
    this.find(".cut").textContent = stage ? `${stage.where}: ${stage.tokens_in} → ${stage.tokens_out} tokens` : first.tokens;
    const withImage = this.alone && this.bands.length === 1;
    const kinds = !stage ? ["image"] : [...(withImage ? ["image"] : []), "kept", ...(stage.scores ? ["scores"] : []), ...(stage.shares ? ["shares"] : [])];
    const layout = JSON.stringify([kinds, this.bands.map(([slot]) => slot)]);
    const views = this.find(".views");
    if (layout !== this.layout) {
      this.layout = layout;
      this.figures = kinds.flatMap((kind) => this.bands.map(([slot]) => this.figure(kind, slot)));
      views.replaceChildren(...this.figures.map((one) => one.root));
      views.classList.toggle("several", this.bands.length > 1);
      views.classList.toggle("one", this.figures.length === 1);
    }
    this.draw();
    const keys = stage ? drawing.legendOf(this.bands.map(([, band]) => band), number, this.setup.colours) : [];
    this.find(".keys").replaceChildren(...keys.map(legendItem));
    this.find(".notes").replaceChildren(...first.notes.map((note) => element("li", { textContent: note })));
  }

  showStrip() {
    const strip = this.find(".strip"), [slot, band] = this.bands[0];
    strip.hidden = band.stages.length < 2;
    if (strip.hidden) return strip.replaceChildren();
    const kept = strip.children.length === band.stages.length;
    if (!kept) {
      strip.replaceChildren(
        ...band.stages.map((_, number) => {
          const button = element("button", { type: "button" }, element("canvas"), element("span"));
          button.addEventListener("click", () => {
            this.cut = number;
            this.showPictures();
          });
          return button;
        }),
      );
    }
    band.stages.forEach((stage, number) => {
      const button = strip.children[number];
      button.setAttribute("aria-pressed", String(number === this.cutNumber));
      button.setAttribute("aria-label", `${stage.where}: ${stage.tokens_in} to ${stage.tokens_out} tokens`);
      button.lastChild.textContent = `${stage.where.replace("after ", "").replace("before ", "")} · ${stage.tokens_out}`;
      drawing.drawKept(button.firstChild, this.images[slot], band, stage, this.setup.colours);
    });
  }

  figure(kind, slot) {
    const titles = { image: "image", kept: "kept patches", scores: "scores", shares: "weights, %" };
    const canvas = element("canvas", { tabIndex: 0 });
    const name = this.bands.length > 1 ? `${slot}, ${titles[kind]}` : titles[kind];
    canvas.setAttribute("role", "img");
    const root = element("figure", {}, element("figcaption", { textContent: name }), canvas);
    const made = { kind, slot, canvas, root, name };
    if (kind === "scores" || kind === "shares") {
      made.low = element("span");
      made.high = element("span");
      const bar = element("canvas");
      drawing.drawScale(bar, this.setup.colours);
      root.append(element("div", { className: "scale" }, made.low, bar, made.high));
    }
    const move = (patch) => {
      if (patch === this.at) return;
      this.at = patch;
      this.draw();
      this.readOut(slot);
    };
    canvas.addEventListener("pointermove", (event) => move(drawing.patchAt(canvas, this.outcome.images[slot], event)));
    canvas.addEventListener("pointerleave", () => document.activeElement !== canvas && move(null));
    canvas.addEventListener("blur", () => move(null));
    canvas.addEventListener("keydown", (event) => {
      const band = this.outcome.images[slot];
      if (!band.grid || !event.key.startsWith("Arrow")) return;
      event.preventDefault();
      const [rows, columns] = band.grid, at = this.at ?? 0;
      const row = Math.floor(at / columns), column = at % columns;
      const down = (event.key === "ArrowDown") - (event.key === "ArrowUp"), across = (event.key === "ArrowRight") - (event.key === "ArrowLeft");
      const clamp = (value, count) => Math.max(0, Math.min(count - 1, value));
      move(this.at === null ? 0 : clamp(row + down, rows) * columns + clamp(column + across, columns));
    });
    return made;
  }

  readOut(slot) {
    const band = this.outcome.images[slot], stage = band.stages[this.cutNumber];
    this.find(".readout").textContent = this.at === null || !stage ? "" : drawing.describePatch(band, stage, this.at);
  }

  draw() {
    if (!this.outcome) return;
    for (const one of this.figures) {
      const band = this.outcome.images[one.slot], stage = band.stages[this.cutNumber], image = this.images[one.slot];
      const at = stage && this.at !== null && this.at < stage.states.length ? this.at : null;
      const { colours } = this.setup;
      if (one.kind === "image") drawing.drawOriginal(one.canvas, image, band);
      else if (one.kind === "kept") drawing.drawKept(one.canvas, image, band, stage, colours, at);
      else drawing.drawHeat(one.canvas, image, band, stage, stage[one.kind], colours, at);
      const tokens = stage ? `, ${stage.where}, ${stage.tokens_out} of ${stage.tokens_in} tokens; arrow keys read patches` : "";
      one.canvas.setAttribute("aria-label", `${one.name}${tokens}`);
      if (one.low) [one.low.textContent, one.high.textContent] = drawing.rangeOf(stage[one.kind]).map((value) => value.toPrecision(3));
    }
  }
}

function listed(options) {
  return Object.entries(options).map(([name, value]) => `${name}=${value}`).join(",");
}

function legendItem(key) {
  const sample = element("i", { className: key.dot ? "dot" : "" });
  if (key.fill) sample.style.background = key.fill;
  if (key.border) sample.style.borderColor = key.border;
  return element("li", {}, sample, key.label);
}
