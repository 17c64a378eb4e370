// The program by layers, before and after, with marks on what changed.

const main = document.getElementById("main");
const CONTEXT = 2; // unchanged ops that are shown around those that changed
const FIRST = 400; // rows of a section that are drawn at once

function drawProgram() {
  const moment = moments[state.moment];
  rowsOf(moment);
  const sections = moment.own.parts.flatMap((part) => [
    part.name ? el("h2", {}, part.name.replace("_", " of stage ")) : "",
    slotsSection(moment, part),
    ...part.sections.map((section) => sectionOf(moment, section)),
  ]);
  const shown = sections.filter(Boolean);
  main.replaceChildren(headOf(moment), ...panelsOf(moment), el("h2", { id: "program" }, "Program by layers"),
    ...(shown.length ? shown : [el("p", { class: "soft" }, "Nothing here has that.")]));
}

function namesOf(layers) {
  if (layers.length === 1) return layers[0];
  return `${layers[0]} … ${layers.at(-1)}`;
}

function sectionOf(moment, section) {
  const rows = rowsOf(moment).slice(section.first, section.first + section.kinds.length)
    .map((row) => (moment.same ? { ...row, kind: "same", before: row.after } : row))
    .filter((row) => row.after || !moment.same);
  const equal = section.layers.length > 1 ? `${section.layers.length} equal layers` : "";
  return layerOf(moment, namesOf(section.layers), equal, rows);
}

function slotsSection(moment, part) {
  const rows = part.slotRows.map((row) => (moment.same ? { ...row, kind: "same", before: row.after } : row))
    .filter((row) => row.after || !moment.same);
  return layerOf(moment, "arguments and results", "", rows);
}

function layerOf(moment, name, note, rows) {
  const found = state.query ? rows.filter((row) => matches(row, state.query)) : rows;
  const counts = {};
  for (const row of rows) if (row.kind !== "same") counts[row.kind] = (counts[row.kind] ?? 0) + 1;
  if (state.query && !found.length) return null;
  if (state.onlyChanges && !Object.keys(counts).length) return null;
  const body = el("div", { class: `ops${hasSides(moment) ? " sides" : ""}` });
  const number = state.query ? `${found.length} of ${plural(rows.length, "op")}` : plural(rows.length, "op");
  const layer = el("details", { class: "layer", "data-name": name },
    el("summary", {}, el("b", {}, name), el("small", {}, note),
      el("small", {}, number), kinds(counts)), body);
  const fill = () => body.childElementCount || body.append(...linesOf(moment, found));
  layer.addEventListener("toggle", () => layer.open && fill());
  layer.fill = () => { layer.open = true; fill(); };
  layer.rowNumbers = new Set(found.map((row) => row.number));
  if (state.open.has(name) || (state.query && found.length <= 40)) layer.fill();
  return layer;
}

const hasSides = (moment) => state.sides && !moment.same && moment.index > 0;

// The rows of a layer; long runs without a change become a line that opens.
function linesOf(moment, rows) {
  const lines = [];
  let run = [];
  const hasChanges = rows.some((row) => row.kind !== "same");
  const flush = (isLast) => {
    const isFirst = !lines.length;
    const keep = hasChanges && !state.query ? CONTEXT : Infinity;
    const head = isFirst ? 0 : Math.min(keep, run.length);
    const tail = isLast ? 0 : Math.min(keep, run.length - head);
    const hidden = run.slice(head, run.length - tail);
    lines.push(...run.slice(0, head).map((row) => lineOf(moment, row)));
    if (hidden.length && hasChanges && !state.query) lines.push(gapOf(moment, hidden));
    else lines.push(...hidden.map((row) => lineOf(moment, row)));
    lines.push(...run.slice(run.length - tail, run.length).map((row) => lineOf(moment, row)));
    run = [];
  };
  for (const row of rows.slice(0, FIRST)) {
    if (row.kind === "same") run.push(row);
    else {
      flush(false);
      lines.push(lineOf(moment, row));
    }
  }
  flush(true);
  if (rows.length > FIRST) lines.push(moreOf(moment, rows.slice(FIRST)));
  return lines;
}

function gapOf(moment, rows) {
  if (rows.length <= 2) {
    const block = document.createDocumentFragment();
    block.append(...rows.map((row) => lineOf(moment, row)));
    return block;
  }
  return el("button", {
    class: "gap", type: "button",
    onclick: (event) => event.target.replaceWith(...rows.map((row) => lineOf(moment, row))),
  }, `… ${rows.length} unchanged`);
}

function moreOf(moment, rows) {
  return el("button", {
    class: "gap", type: "button",
    onclick: (event) => event.target.replaceWith(...linesOf(moment, rows)),
  }, `… ${plural(rows.length, "more op")}`);
}

function lineOf(moment, row) {
  const sides = hasSides(moment);
  const known = parsed(row.after ?? row.before);
  const line = el("div", { class: `op ${row.kind} ${known.phase}`, "data-row": row.number },
    el("div", { class: "sign", title: row.kind }, SIGNS[row.kind]));
  const earlier = moment.previous && partOf(moment.previous, row.part.name);
  const both = row.kind === "removed" || (row.kind === "changed" && !sides) || sides;
  if (sides || row.kind === "removed") {
    line.append(sideOf("before", row.before, earlier, row));
  }
  if (row.after || sides) line.append(sideOf("after", row.after, row.part, row));
  if (!sides || both) line.append(...detailsOf(row));
  return line;
}

function sideOf(side, text, part, row) {
  const box = el("div", { class: `line ${side}${text === null ? " none" : ""}` });
  if (text === null) return box;
  const moment = side === "before" ? moments[state.moment].previous : row.moment;
  box.append(...tokensOf(text, moment, part));
  return box;
}

const partOf = (moment, name) => moment.own.parts.find((part) => part.name === name) ?? null;

// A line for reading: values that can be clicked, then type, layer, copy and shards.
function tokensOf(text, moment, part) {
  const known = parsed(text);
  const found = [];
  known.results.forEach((name, i) => found.push(i ? ", " : "", valueLink(name, moment, part)));
  if (known.results.length) found.push(" = ");
  found.push(el("b", {}, known.op), ...withLinks(known.call, moment, part));
  const notes = [shortTypes(known.types), known.layer, known.copy && `copy ${known.copy}`, known.shards];
  found.push(el("span", { class: "notes" }, `  ${notes.filter(Boolean).join(" · ")}`));
  return found;
}

function withLinks(call, moment, part) {
  const found = [];
  let at = 0;
  for (const match of call.matchAll(/"(?:[^"\\]|\\.)*"|%[\w.$-]+/g)) {
    if (match[0][0] === '"') continue;
    found.push(call.slice(at, match.index), valueLink(match[0], moment, part));
    at = match.index + match[0].length;
  }
  found.push(call.slice(at));
  return found;
}

function valueLink(name, moment, part) {
  return el("button", {
    class: "v", type: "button",
    onclick: () => show({ value: { moment: moment.index, part: part?.name ?? "", name } }),
  }, name);
}

function detailsOf(row) {
  return row.details.map(([what, before, after]) =>
    el("div", { class: "detail" }, `${what}: ${shorter(words[before]) || "(none)"} → ${shorter(words[after]) || "(none)"}`));
}

const shorter = (text) => shortTypes(text).replaceAll(/#dist\.sharding<(.*?)>(?=[\],]|$)/g, "$1").replaceAll('"', "");

// Opens the layer that has a row, and brings the row into view.
function reveal(number) {
  const layer = [...main.querySelectorAll(".layer")].find((one) => one.rowNumbers.has(number));
  if (!layer) return;
  layer.fill();
  let line = layer.querySelector(`[data-row="${number}"]`);
  while (!line && layer.querySelector(".gap")) {
    layer.querySelector(".gap").click();
    line = layer.querySelector(`[data-row="${number}"]`);
  }
  main.querySelectorAll(".here").forEach((one) => one.classList.remove("here"));
  line?.classList.add("here");
  line?.scrollIntoView({ block: "center" });
}
