// What the model says and what it costs, with all tokens and under each plan.

import { element } from "./state.js";

const SHOWN = 5; // texts
const LETTERS = ["A", "B"];

function columns(result) {
  const plans = result.plans.map((plan, number) => ({ name: LETTERS[number], kind: LETTERS[number].toLowerCase(), outcome: plan }));
  return [{ name: "all", kind: "full", outcome: result.full }, ...plans];
}

function tag(column) {
  const words = column.kind === "full" ? "all tokens" : `plan ${column.name}`;
  return element("span", { className: `tag ${column.kind}`, textContent: words });
}

export function showSays(root, result) {
  const shown = { texts: showTexts, question: showAnswers, people: showPeople }[result.full.says.kind];
  root.replaceChildren(...shown(columns(result).filter((column) => !column.outcome.error)));
}

function showTexts(found) {
  const parts = [], typed = found[0].outcome.says.typed;
  const ranked = found.map((column) => [...column.outcome.says.rows].sort((a, b) => b.similarity - a.similarity));
  const best = ranked.map((rows) => rows[0]?.text);
  if (best[0] !== undefined) {
    const texts = [...new Set([...ranked[0].slice(0, SHOWN), ...ranked.slice(1).flatMap((rows) => rows.slice(0, 2))].map((row) => row.text))];
    const head = element("tr", {}, element("th", { scope: "col", textContent: typed ? "text" : "class" }));
    for (const column of found) head.append(element("th", { scope: "col" }, tag(column)));
    const body = texts.map((text) => {
      const line = element("tr", {}, element("th", { scope: "row", textContent: text }));
      found.forEach((column, number) => {
        const row = column.outcome.says.rows.find((one) => one.text === text);
        const words = typed ? row.similarity.toFixed(3) : `${(100 * row.share).toFixed(1)}%`;
        const bar = element("span", { className: `bar ${column.kind}` }, element("span"));
        bar.firstChild.style.width = `${(100 * row.share).toFixed(1)}%`;
        const title = `similarity ${row.similarity.toFixed(4)}, share ${(100 * row.share).toFixed(1)}% of these texts`;
        line.append(element("td", { className: best[number] === text ? "first" : "", title }, words, bar));
      });
      return line;
    });
    parts.push(element("div", { className: "wide" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
  }
  found.slice(1).forEach((column, number) => {
    const { likeness } = column.outcome.says;
    const line = element("p", { className: "small soft" }, tag(column), ": ");
    if (best[0] !== undefined) {
      const same = best[number + 1] === best[0];
      line.append(element("span", { className: same ? "same" : "other", textContent: same ? "the same first place" : "another first place" }), "; ");
    }
    if (likeness !== undefined) line.append(`cosine similarity of its feature to that of all tokens: ${likeness.toFixed(3)}`);
    parts.push(line);
  });
  return parts;
}

function showAnswers(found) {
  const list = element("dl", { className: "answers" });
  const full = found[0].outcome.says.answer;
  found.forEach((column, number) => {
    const { answer } = column.outcome.says;
    const line = element("dd", { textContent: answer || "(nothing)" });
    if (number) line.append(" ", element("span", { className: answer === full ? "same" : "other", textContent: answer === full ? "the same" : "not the same" }));
    list.append(element("dt", {}, tag(column)), line);
  });
  const { expected } = found[0].outcome.says;
  return expected ? [list, element("p", { className: "small soft", textContent: `Expected: ${expected}` })] : [list];
}

function showPeople(found) {
  const { model } = showPeople;
  const parts = found.flatMap((column) => {
    const people = column.outcome.says.people.map((one, rank) => {
      const source = `/api/sample?${new URLSearchParams({ model, number: one.sample, slot: showPeople.slot })}`;
      const words = `${rank + 1}. ${one.distance.toFixed(2)}${one.match ? " ✓" : ""}`;
      const image = element("img", { src: source, alt: `${one.name}${one.match ? ", the same person" : ""}`, title: one.name });
      return element("li", { className: one.match ? "match" : "" }, image, words);
    });
    return [tag(column), element("ol", { className: "people" }, ...people)];
  });
  const words = found[0].outcome.says.known
    ? "The nearest of 12 people in a gallery, by squared distance; ✓ is the same person before another camera."
    : "The nearest of 12 people in a gallery, by squared distance.";
  return [...parts, element("p", { className: "small soft", textContent: words })];
}

export function setPeople(model, slot) {
  Object.assign(showPeople, { model, slot });
}

function tokensOf(outcome) {
  const band = Object.values(outcome.images)[0];
  return band.stages.at(-1)?.tokens_out ?? (band.grid ? band.grid[0] * band.grid[1] : null);
}

export function showCost(root, note, result, timing) {
  const head = element("tr", {}, ...["", "tokens", "GFLOPs", "time", "speed"].map((name) => element("th", { scope: "col", textContent: name })));
  const times = timing ? [timing.full, ...timing.plans] : [];
  const body = columns(result).map((column, number) => {
    const line = element("tr", {}, element("th", { scope: "row" }, tag(column)));
    const { outcome } = column, time = times[number];
    if (outcome.error) return (line.append(element("td", { colSpan: 4, textContent: "not a plan yet" })), line);
    const waiting = timing ? "–" : "…";
    const speed = element("td", { textContent: time && number ? `${time.speedup.toFixed(2)}×` : number ? waiting : "" });
    if (time && number) speed.title = `half of the rounds are between ${time.speedup_low.toFixed(2)} and ${time.speedup_high.toFixed(2)}`;
    line.append(
      element("td", { textContent: String(tokensOf(outcome) ?? "?") }),
      element("td", { textContent: outcome.gflops >= 100 ? outcome.gflops.toFixed(0) : outcome.gflops.toPrecision(3) }),
      element("td", { textContent: time ? milliseconds(time.seconds) : waiting }),
      speed,
    );
    return line;
  });
  root.replaceChildren(element("div", { className: "wide" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...body))));
  const words = timing ? `Measured here: the median of ${timing.rounds} rounds, all plans in turn, ${threads(timing)}.` : "Measuring the time …";
  note.textContent = timing?.warning ? `${words} Note: ${timing.warning}.` : words;
}

function threads(timing) {
  return timing.threads === 1 ? "one thread" : `${timing.threads} threads`;
}

function milliseconds(seconds) {
  return seconds >= 1 ? `${seconds.toFixed(2)} s` : `${(1000 * seconds).toPrecision(3)} ms`;
}
