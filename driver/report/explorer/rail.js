// The rail of passes, each with its numbers, and the head of the moment that is shown.

const rail = document.getElementById("rail");

function drawRail() {
  const items = moments.map((moment) => {
    const before = moment.previous?.amounts ?? {};
    const rows = moment.same ? [] : moment.rail.flatMap(([name, text]) => [
      el("dt", {}, name),
      el("dd", { class: trend(before[name], moment.amounts[name]) }, text),
    ]);
    const button = el("button", { type: "button", onclick: () => show({ moment: moment.index }) },
      el("div", { class: "name" }, moment.name),
      moment.same ? el("small", {}, "changed nothing") : kinds(moment.counts),
      el("dl", {}, ...rows));
    return el("li", { class: moment.same ? "same" : "" }, button);
  });
  rail.replaceChildren(el("ol", {}, ...items));
}

// Whether a number went up or down; neither where there was none before.
const trend = (was, is) => (is > was ? "up" : is < was ? "down" : "");

function kinds(counts) {
  const found = Object.entries(counts).filter(([, count]) => count);
  if (!found.length) return "";
  return el("div", { class: "kinds" }, ...found.map(([kind, count]) =>
    el("span", { class: kind, title: `${count} ${kind}` }, `${SIGNS[kind]} ${count.toLocaleString("en")}`)));
}

function markRail() {
  [...rail.querySelectorAll("button")].forEach((button, index) => {
    button.setAttribute("aria-current", String(index === state.moment));
    if (index === state.moment) button.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}

function headOf(moment) {
  const own = moment.own;
  const said = moment.same ? "This pass changed nothing." : "";
  return el("section", {},
    el("h2", {}, moment.name, el("code", {}, optionsOf(moment))),
    el("p", { class: "soft" }, ...withCode(moment.summary), moment.seconds ? ` It took ${moment.seconds}.` : ""),
    el("p", {}, said), moment.same ? "" : kinds(own.counts));
}

const optionsOf = ({ name, spec }) => (spec.startsWith(name) ? spec.slice(name.length) : ` ${spec}`);

const withCode = (text) => text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));

function panelsOf(moment) {
  const own = moment.own;
  const panel = (name, isOpen, ...body) => el("details", { class: "panel", open: isOpen ? "" : null },
    el("summary", {}, name), ...body);
  const found = [panel("Numbers", false, numbersTable(own))];
  if (moment.choices.length) found.unshift(panel("Plan", true, table(["choice", "value"], moment.choices, () => false)));
  if (own.axes.length) found.push(panel("Mesh", false, axesTable(own)));
  if (own.schedule.length) found.push(panel("Schedule", true, scheduleTable(own.schedule)));
  if (own.streams >= 0) found.push(panel("Streams over time", true, fromHtml(words[own.streams])));
  if (own.memory >= 0) found.push(panel("Memory over time", false, fromHtml(words[own.memory])));
  if (own.whyNot) found.push(el("p", { class: "soft" }, own.whyNot));
  return found;
}

function table(head, rows, numeric) {
  const cell = (tag) => (text, i) => el(tag, { class: numeric(i) ? "n" : "" }, text);
  return el("div", { class: "wide" }, el("table", {},
    el("tr", {}, ...head.map(cell("th"))),
    ...rows.map((row) => el("tr", {}, ...row.map(cell("td"))))));
}

const numbersTable = (own) => table(["", "before", "after", "change"], own.numbers, (i) => i > 0);

const axesTable = (own) => table(["axis", "kind", "size", "devices of each group"], own.axes, (i) => i === 2);

function scheduleTable(rows) {
  const cell = (text) => {
    const kind = text === "." ? "bubble" : text[0].toUpperCase();
    return el("td", { class: kind, title: CELLS[kind] ?? "" }, text === "." ? "" : text);
  };
  const joined = rows.map((row, rank) => {
    const cells = [];
    row.forEach((text) => {
      if (text !== "-") cells.push(cell(text));
      else cells.at(-1).colSpan += 1;
    });
    return el("tr", {}, el("th", {}, `rank ${rank}`), ...cells);
  });
  const legend = Object.entries(CELLS).map(([kind, said]) => `${kind}: ${said}`).join("; ");
  return el("div", { class: "wide" }, el("table", { class: "schedule" }, ...joined),
    el("p", { class: "soft" }, `${legend}; the number is the micro-batch, small letters are later stages of a rank.`));
}

const CELLS = {
  F: "forward", B: "backward", I: "backward to the inputs", W: "backward to the weights",
};
