// Tables are sorted by a click on a heading, or by Enter; points of plots say what they are under the pointer or with the Tab key.
"use strict";
function valueOf(cell) {
  const text = cell ? (cell.dataset.value ?? cell.textContent).trim() : "";
  const number = text === "" ? NaN : Number(text.replace(/^.*→\s*/, "").replace(/[×%]|\s*±.*$/g, ""));
  return { text, number };
}
function compare(a, b) {
  if (!Number.isNaN(a.number) && !Number.isNaN(b.number)) return a.number - b.number;
  if (Number.isNaN(a.number) !== Number.isNaN(b.number)) return Number.isNaN(a.number) ? 1 : -1; // numbers first
  return a.text.localeCompare(b.text, undefined, { numeric: true });
}
function sortBy(table, head, column) {
  const down = head.getAttribute("aria-sort") === "ascending" || (!head.hasAttribute("aria-sort") && head.dataset.first === "down");
  for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const rows = [...table.tBodies[0].rows].map((row) => [valueOf(row.cells[column]), row]);
  const isEmpty = ({ text }) => text === "" || text === "–" || text === "—" || text === "-";
  rows.sort(([a], [b]) => isEmpty(a) - isEmpty(b) || (down ? -1 : 1) * compare(a, b)); // what is missing stays below
  table.tBodies[0].append(...rows.map(([, row]) => row));
}
for (const table of document.querySelectorAll("table.sortable")) {
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    const cells = [...table.tBodies[0].rows].map((row) => valueOf(row.cells[column]));
    const isWords = cells.every(({ number }) => Number.isNaN(number));
    if (isWords) for (const row of table.rows) row.cells[column]?.classList.add("words");
    else if (column > 0) head.dataset.first = "down"; // the best numbers first
    button.addEventListener("click", () => sortBy(table, head, column));
  });
}
for (const chart of document.querySelectorAll("figure.chart")) {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  chart.append(tip);
  for (const point of chart.querySelectorAll(".point")) {
    const title = point.querySelector("title");
    const words = title.textContent;
    point.setAttribute("aria-label", words);
    title.remove(); // the browser would show it too
    const show = () => {
      tip.textContent = words;
      tip.hidden = false;
      point.classList.add("at");
      const box = chart.getBoundingClientRect(), at = point.getBoundingClientRect();
      const left = at.left + at.width / 2 - box.left - tip.offsetWidth / 2;
      tip.style.left = `${Math.max(4, Math.min(left, box.width - tip.offsetWidth - 4))}px`;
      const top = at.top - box.top - tip.offsetHeight - 8;
      tip.style.top = `${top > 0 ? top : at.bottom - box.top + 8}px`;
    };
    const hide = () => {
      tip.hidden = true;
      point.classList.remove("at");
    };
    for (const name of ["pointerenter", "focus"]) point.addEventListener(name, show);
    for (const name of ["pointerleave", "blur"]) point.addEventListener(name, hide);
  }
}
