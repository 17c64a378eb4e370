// The line of an op, taken apart: `%y = aten.mm(%x, %w) {layer = "h.0", ...} : tensor<4x4xf32>`.

const NAME = /%[\w.$-]+/g;
const FIELDS = Object.fromEntries(["layer", "phase", "copy", "origin"].map((name) =>
  [name, new RegExp(`(?:^|, )${name} = ("[^"]*"|\\[[^\\]]*\\]|\\w+)`)]));
const parts = new Map();

function parsed(line) {
  let found = parts.get(line);
  if (!found) parts.set(line, (found = parse(line)));
  return found;
}

function parse(line) {
  const first = line.split("\n", 1)[0];
  const head = /^((?:%[\w.$-]+(?:, )?)+) = /.exec(first);
  const results = head ? head[1].match(NAME) : [];
  const rest = head ? first.slice(head[0].length) : first;
  const op = /^[\w.]+/.exec(rest)?.[0] ?? "";
  const opens = annotationsAt(rest);
  const colon = rest.lastIndexOf(" : ");
  const end = opens < 0 ? (colon < 0 ? rest.length : colon) : opens;
  const call = rest.slice(op.length, end);
  const braces = opens < 0 ? "" : rest.slice(opens + 2, rest.lastIndexOf("}"));
  const field = (name) => FIELDS[name].exec(braces)?.[1];
  return {
    results,
    op,
    call,
    braces,
    operands: withoutStrings(call).match(NAME) ?? [],
    types: colon < 0 ? "" : rest.slice(colon + 3),
    layer: (field("layer") ?? "").replaceAll('"', ""),
    phase: field("phase") ?? "",
    copy: (field("copy") ?? "").replaceAll(" : i64", ""),
    origin: (field("origin") ?? "").replaceAll('"', ""),
    shards: shardsIn(braces),
    axes: (/axes = (\[[^\]]*\])/.exec(call)?.[1] ?? "").match(/[\w.]+/g) ?? [],
    why: /why = "((?:[^"\\]|\\.)*)"/.exec(call)?.[1] ?? "",
  };
}

// Annotations follow the call; the words of an argument may hold braces too.
function annotationsAt(rest) {
  for (const name of ["layer", "phase", "sharding", "used", "wanted", "aliases"]) {
    const at = rest.lastIndexOf(` {${name} = `);
    if (at >= 0) return at;
  }
  return -1;
}

const withoutStrings = (text) => text.replace(/"(?:[^"\\]|\\.)*"/g, '""');

function shardsIn(braces) {
  const at = braces.search(/(?:^|, )sharding = /);
  if (at < 0) return "";
  const found = [...braces.slice(at).matchAll(/#dist\.sharding<(.*?)>(?=[\],]|$)/g)];
  return found.map((match) => match[1].replaceAll('"', "")).join("; ");
}

const shortTypes = (types) => types.replaceAll(/tensor<([^>]*)>/g, "$1");

// Elements

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

function fromHtml(html) {
  const template = document.createElement("template");
  template.innerHTML = html;
  return template.content;
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;
