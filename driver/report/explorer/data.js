// The data of the page: moments of a program, with texts and drawings by their numbers.

const KINDS = ["same", "added", "removed", "moved", "changed"];
const SIGNS = { same: "", added: "+", removed: "−", moved: "›", changed: "~" };

async function read(id) {
  const packed = atob(document.getElementById(id).textContent.trim());
  const bytes = new Uint8Array(packed.length); // a loop, since `from` calls a function for each byte
  for (let i = 0; i < packed.length; i += 1) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).json();
}

const { words, moments, title } = await read("data");

// A moment at which nothing changed shows the program of the one before it.
moments.forEach((moment, index) => {
  moment.index = index;
  moment.own = moment.same ? moments[index - 1].own : moment;
  moment.previous = index ? moments[index - 1].own : null;
});

// All rows of a moment in order, made when they are first asked for.
function rowsOf(moment) {
  const own = moment.own;
  if (own.rows) return own.rows;
  own.rows = [];
  own.parts.forEach((part) => {
    part.moment = own;
    part.sections.forEach((section) => {
      section.part = part;
      section.first = own.rows.length;
      section.kinds.forEach((kind, i) => {
        const row = { moment: own, part, section, number: own.rows.length, kind: KINDS[kind] };
        row.before = section.before[i] < 0 ? null : words[section.before[i]];
        row.after = section.after[i] < 0 ? null : words[section.after[i]];
        row.back = section.back[i];
        row.details = section.details[i] ?? [];
        row.pictures = section.pictures[i] ?? [];
        row.origin = section.origins[i] ?? null;
        row.place = section.places[i] < 0 ? "" : words[section.places[i]];
        own.rows.push(row);
      });
    });
    part.slotRows = part.slots.kinds.map((kind, i) => {
      const text = (side) => (part.slots[side][i] < 0 ? null : words[part.slots[side][i]]);
      const row = { moment: own, part, number: -1, kind: KINDS[kind], details: [], origin: null };
      Object.assign(row, { before: text("before"), after: text("after"), back: -1, place: "" });
      row.pictures = part.slots.pictures[i] ?? [];
      return row;
    });
  });
  return own.rows;
}

// The rows of a part by the values that they make; lines are read when that is first asked for.
function madeIn(part) {
  if (!part.byName) {
    part.byName = new Map();
    for (const row of [...rowsOf(part.moment), ...part.slotRows]) {
      if (row.part !== part || !row.after) continue;
      for (const name of parsed(row.after).results) part.byName.set(name, row);
    }
  }
  return part.byName;
}

// Where a value is made: a row, and the layer that it is in if the row only stands for it.
function makerOf(part, name) {
  const row = madeIn(part).get(name);
  if (row) return { row, layer: "" };
  const away = part.away[name];
  return away ? { row: rowsOf(part.moment)[away[0]], layer: words[away[1]] } : null;
}

// The ops that read a value, by name: those on the page, then those of layers that are not.
function usersOf(moment, part, name) {
  if (!part.users) {
    part.users = new Map();
    const add = (key, row) => {
      if (!part.users.has(key)) part.users.set(key, []);
      part.users.get(key).push({ row, layer: "" });
    };
    for (const row of [...rowsOf(moment), ...part.slotRows]) {
      if (row.part !== part || !row.after) continue;
      for (const key of new Set(parsed(row.after).operands)) add(key, row);
    }
  }
  const rows = rowsOf(moment);
  const away = (part.uses[name] ?? []).map(([row, layer]) => ({ row: rows[row], layer: words[layer] }));
  return [...(part.users.get(name) ?? []), ...away];
}
