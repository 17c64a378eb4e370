// What is shown, how it is searched, and the keys.

const state = { moment: moments.length - 1, query: "", onlyChanges: false, sides: true, open: new Set(), value: null };
const search = document.getElementById("search");

function show(change) {
  const isProgram = Object.keys(change).some((key) => key !== "value");
  if (change.moment !== undefined && change.moment !== state.moment) rememberOpen();
  Object.assign(state, change);
  if (isProgram) {
    drawProgram();
    markRail();
  }
  if ("value" in change) drawValue();
  for (const [id, isOn] of [["only", state.onlyChanges], ["sides", state.sides]]) {
    document.getElementById(id).setAttribute("aria-pressed", String(isOn));
  }
  if (location.protocol !== "about:") history.replaceState(null, "", `#${hashOf()}`);
}

function rememberOpen() {
  for (const layer of main.querySelectorAll(".layer")) {
    if (state.query) continue;
    if (layer.open) state.open.add(layer.dataset.name);
    else state.open.delete(layer.dataset.name);
  }
}

// The address says what is shown, so that it can be kept and sent.
function hashOf() {
  const entries = { pass: state.moment };
  if (state.query) entries.q = state.query;
  if (state.value) entries.value = [state.value.moment, state.value.part, state.value.name].join("/");
  return new URLSearchParams(entries).toString();
}

function fromHash() {
  const entries = new URLSearchParams(location.hash.slice(1));
  const change = {};
  const pass = Number(entries.get("pass") ?? state.moment);
  change.moment = Number.isInteger(pass) && moments[pass] ? pass : state.moment;
  change.query = search.value = entries.get("q") ?? "";
  if (entries.get("open")) state.open = new Set(entries.get("open").split(","));
  const [moment, part, name] = (entries.get("value") ?? "").split("/");
  change.value = name && moments[Number(moment)] ? { moment: Number(moment), part, name } : null;
  return change;
}

// `layer:h.0 op:all_reduce axis:tensor`, or any words of a line; all of them must be there.
function matches(row, query) {
  const line = row.after ?? row.before;
  const known = parsed(line);
  return query.toLowerCase().split(/\s+/).filter(Boolean).every((word) => {
    const [, field, text] = /^(layer|op|axis|phase|is):(.*)$/.exec(word) ?? [null, "", word];
    if (!field) return line.toLowerCase().includes(text);
    if (field === "axis") return usesAxis(line, known, text);
    if (field === "layer") return isWithin(known.layer.toLowerCase(), text);
    const own = { op: known.op, phase: known.phase, is: row.kind }[field];
    return own.toLowerCase().includes(text);
  });
}

const isWithin = (layer, name) => layer === name || layer.startsWith(`${name}.`) || layer.endsWith(`.${name}`)
  || layer.includes(`.${name}.`);

const usesAxis = (line, known, axis) => known.axes.length
  ? known.axes.includes(axis) : (line.match(/"[\w.]+"/g) ?? []).includes(`"${axis}"`);

// Changes

function changedRows() {
  const moment = moments[state.moment];
  return moment.same ? [] : rowsOf(moment).filter((row) => row.kind !== "same");
}

function step(direction) {
  const rows = changedRows();
  if (!rows.length) return;
  const at = Number(main.querySelector(".here")?.dataset.row ?? (direction > 0 ? -1 : Infinity));
  const next = direction > 0 ? rows.find((row) => row.number > at) : rows.findLast((row) => row.number < at);
  reveal((next ?? (direction > 0 ? rows[0] : rows.at(-1))).number);
}

const turn = (by) => show({ moment: Math.min(Math.max(state.moment + by, 0), moments.length - 1) });

function openAll() {
  const layers = [...main.querySelectorAll(".layer")];
  const isOpen = layers.every((layer) => layer.open);
  for (const layer of layers) {
    if (isOpen) layer.open = false;
    else layer.fill();
  }
}

const KEYS = {
  ArrowLeft: () => turn(-1), ArrowRight: () => turn(1), k: () => turn(-1), j: () => turn(1),
  n: () => step(1), p: () => step(-1), o: openAll,
  s: () => show({ sides: !state.sides }), c: () => show({ onlyChanges: !state.onlyChanges }),
  "/": () => search.focus(), "?": () => document.getElementById("help").showModal(),
  Escape: () => show({ value: null }),
};

document.addEventListener("keydown", (event) => {
  const isTyping = event.target === search;
  if (isTyping && event.key === "Escape") search.blur();
  if (isTyping || event.ctrlKey || event.metaKey || event.altKey || !KEYS[event.key]) return;
  if (document.getElementById("help").open) return;
  event.preventDefault();
  KEYS[event.key]();
});

let waiting = 0;
search.addEventListener("input", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => show({ query: search.value.trim() }), 120);
});
for (const [id, key] of [["only", "c"], ["sides", "s"], ["all", "o"], ["next", "n"], ["keys", "?"]]) {
  document.getElementById(id).addEventListener("click", () => KEYS[key]());
}
window.addEventListener("hashchange", () => show(fromHash()));

drawRail();
show(fromHash());
document.documentElement.dataset.ready = "yes";
