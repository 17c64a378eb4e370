// What is known of a value: its line, shards, producers and users, reshards, and its way here.

const panel = document.getElementById("value");

function drawValue() {
  document.querySelector(".columns").classList.toggle("with-value", Boolean(state.value));
  panel.hidden = !state.value;
  if (!state.value) return;
  const moment = moments[state.value.moment];
  rowsOf(moment);
  const part = partOf(moment, state.value.part);
  const maker = part && makerOf(part, state.value.name);
  const close = el("button", { class: "close", type: "button", title: "close (Esc)", onclick: () => show({ value: null }) }, "×");
  if (!maker) {
    panel.replaceChildren(close, el("h2", {}, state.value.name), el("p", {}, "This value is not on the page."));
    return;
  }
  panel.replaceChildren(close, ...valueParts(moment, part, state.value.name, maker));
  panel.scrollTop = 0;
}

function valueParts(moment, part, name, { row, layer }) {
  const known = parsed(row.after);
  const block = (title, ...body) => (body.flat().filter(Boolean).length ? [el("h3", {}, title), ...body.flat()] : []);
  const picture = row.pictures[Math.max(known.results.indexOf(name), 0)] ?? -1;
  return [
    el("h2", {}, name),
    layer ? el("p", { class: "soft" }, `In ${layer}, which is equal to this one of ${namesOf(row.section.layers.slice(0, 1))}:`) : "",
    el("pre", {}, row.after),
    row.place ? el("p", { class: "soft" }, `From ${row.place}`) : "",
    el("p", {}, el("button", { class: "v", type: "button", onclick: () => goTo(row) }, "show it in the program")),
    ...block("Shards on the mesh", picture >= 0 ? [el("figure", {}, fromHtml(words[picture])), ...groupsOf(moment, known)] : groupsOf(moment, known)),
    ...block("Reshards, and why", reshardsOf(moment, part, name, row)),
    ...block("Producers", listOf(known.operands.map((one) => [one, makerOf(part, one)]), moment, part)),
    ...block("Users", usersList(moment, part, name)),
    ...block("Its way through the passes", wayOf(moment, row)),
  ];
}

function groupsOf(moment, known) {
  return known.axes.map((axis) => {
    const found = moment.own.axes.find(([name]) => name === axis);
    return el("p", { class: "soft" }, `Over ${axis}: ${found?.[3] ? `groups ${found[3]}` : "sub-batches"}.`);
  });
}

function listOf(pairs, moment, part) {
  const items = pairs.map(([name, maker]) => el("li", {}, valueLink(name, moment, part), " ",
    el("span", { class: "soft" }, maker ? opText(maker) : "")));
  return items.length ? [el("ul", {}, ...items)] : [];
}

function opText({ row, layer }) {
  const known = parsed(row.after);
  return `${known.op}${layer || known.layer ? ` in ${layer || known.layer}` : ""}`;
}

const SHOWN_USERS = 30;

function usersList(moment, part, name) {
  const users = usersOf(moment, part, name);
  const items = users.slice(0, SHOWN_USERS).map((user) => {
    const [first] = parsed(user.row.after).results;
    return el("li", {}, first && !user.layer ? valueLink(first, moment, part) : "", " ",
      el("span", { class: "soft" }, opText(user)));
  });
  if (users.length > SHOWN_USERS) items.push(el("li", { class: "soft" }, `and ${users.length - SHOWN_USERS} more`));
  return items.length ? [el("ul", {}, ...items)] : [];
}

// The moments that a value has been through, the newest first: {row, said}.
function stepsBack(moment, row) {
  const steps = [];
  let at = moment.own;
  let now = row;
  for (let guard = 0; now && guard < 3 * moments.length; guard += 1) {
    if (now.back >= 0) {
      const before = at.previous;
      const earlier = rowsOf(before)[now.back];
      const isCopy = now.kind === "added";
      if (isCopy) steps.push({ at, row: now, said: `copied for a sub-batch by ${at.name}` });
      else if (now.kind !== "same") steps.push({ at, row: now, said: `${now.kind} by ${at.name}` });
      at = before;
      now = earlier;
    } else if (now.origin) {
      steps.push({ at, row: now, said: at.previous ? `cloned by ${at.name}, to be computed again` : "computed again" });
      now = rowsOf(at)[now.origin[0]];
    } else {
      steps.push({ at, row: now, said: at.previous ? `added by ${at.name}` : "in the input" });
      now = null;
    }
  }
  return steps;
}

function wayOf(moment, row) {
  if (row.number < 0) return [];
  const items = stepsBack(moment, row).map(({ at, row: then, said }) => {
    const [first] = parsed(then.after).results;
    return el("li", {}, el("div", {}, said, ": ", first ? valueLink(first, at, then.part) : ""),
      el("pre", {}, then.after));
  });
  return items.length ? [el("ul", { class: "way" }, ...items)] : [];
}

// Reshards stand in the global program: of this value, of what it was made of, and of what it was.
function reshardsOf(moment, part, name, row) {
  const found = new Map();
  const note = (at, one) => {
    const known = parsed(one.after);
    if (known.op === "dist.reshard") found.set(`${at.index} ${one.number}`, { at, row: one, known });
  };
  const starts = madeOf(moment, part, row);
  for (const start of starts) {
    if (start.number < 0) continue;
    for (const [at, then] of past(moment, start)) {
      note(at, then);
      for (const result of parsed(then.after).results) {
        for (const user of usersOf(at, then.part, result)) note(at, user.row);
      }
    }
  }
  for (const user of row.number < 0 ? usersOf(moment, part, name) : []) note(moment.own, user.row);
  // The oldest moment says it best: later ones say the same.
  const byWhy = new Map([...found.values()].map((one) => [one.known.why + one.known.shards, one]));
  return [...byWhy.values()].map((one) => el("p", {}, `to ${one.known.shards || "?"}: `,
    el("b", {}, one.known.why), ` (${one.at.name}, `, valueLink(one.known.results[0], one.at, one.row.part), ")"));
}

// The row, and where it is new what it is made of, up to ops that were there before.
const FAR = 8; // ops that are looked through

function madeOf(moment, part, row) {
  const found = [row];
  for (let i = 0; i < found.length && i < FAR; i += 1) {
    const one = found[i];
    if (one.number < 0 || one.back >= 0 || one.origin || !moment.own.previous) continue;
    for (const operand of parsed(one.after).operands) {
      const maker = makerOf(part, operand);
      if (maker && !found.includes(maker.row)) found.push(maker.row);
    }
  }
  return found;
}

// All moments of a row, also those at which nothing happened to it.
function past(moment, row) {
  const found = [];
  let at = moment.own;
  let now = row;
  while (now) {
    found.push([at, now]);
    if (now.back < 0) break;
    at = at.previous;
    now = rowsOf(at)[now.back];
  }
  return found;
}

function goTo(row) {
  if (row.moment !== moments[state.moment].own) show({ moment: row.moment.index });
  if (row.number >= 0) reveal(row.number);
}
