// Renders one draft tree: the accepted path straight down the left, rejected branches to its right.

const SVG = "http://www.w3.org/2000/svg";

export function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Returns a token with visible whitespace; runs of spaces are counted. */
export function visible(token) {
  return token.replace(/ {4,}/g, (run) => `·×${run.length}`).replace(/\r/g, "␍").replace(/\n/g, "↵").replace(/\t/g, "→").replace(/ /g, "·") || "∅";
}

function shorten(text, length) {
  const characters = [...text];
  return characters.length > length ? `${characters.slice(0, length - 1).join("")}…` : text;
}

/**
 * Returns lanes (columns) and depths (rows) of a tree's nodes. At each depth nodes have depth-first order with
 * accepted children first, so that edges never cross and the accepted path is lane 0.
 */
export function layout({ parents, accepted }) {
  const kept = new Set(accepted);
  kept.add(0);
  const children = parents.map(() => []);
  parents.forEach((parent, node) => parent >= 0 && children[parent].push(node));
  for (const below of children) below.sort((a, b) => kept.has(b) - kept.has(a) || a - b);
  const lane = new Array(parents.length).fill(0);
  const depth = new Array(parents.length).fill(0);
  const free = [];

  function assign(node, level, least) {
    depth[node] = level;
    lane[node] = Math.max(least, free[level] ?? 0);
    free[level] = lane[node] + 1;
    for (const child of children[node]) assign(child, level + 1, lane[node]);
  }

  if (parents.length) assign(0, 0, 0);
  return { lane, depth, kept, lanes: Math.max(...lane, 0) + 1, levels: Math.max(...depth, 0) + 1 };
}

/**
 * Returns how far below its row, as a share of the row's height, each parent's edge turns towards its children.
 * Parents further right turn higher: their children are further right too, so that no edges cross.
 */
function turns({ lane, depth }, parents) {
  const rows = new Map();
  parents.forEach((parent, node) => {
    if (parent < 0 || lane[node] === lane[parent]) return;
    const row = rows.get(depth[parent]) ?? rows.set(depth[parent], new Set()).get(depth[parent]);
    row.add(parent);
  });
  const share = new Map();
  for (const row of rows.values()) {
    const ordered = [...row].sort((a, b) => lane[b] - lane[a]);
    ordered.forEach((parent, rank) => share.set(parent, 0.25 + (0.45 * (rank + 1)) / (ordered.length + 1)));
  }
  return share;
}

function edge(x0, y0, x1, y1, share) {
  if (x0 === x1) return `M${x0} ${y0}V${y1}`;
  const turn = y0 + (y1 - y0) * share;
  const round = Math.min(5, turn - y0, y1 - turn, x1 - x0);
  return `M${x0} ${y0}V${turn - round}Q${x0} ${turn} ${x0 + round} ${turn}H${x1 - round}Q${x1} ${turn} ${x1} ${turn + round}V${y1}`;
}

function nodesAndEdges(tree, shape, { left, top, laneWidth, rowHeight, radius }) {
  const x = (node) => left + shape.lane[node] * laneWidth;
  const y = (node) => top + shape.depth[node] * rowHeight;
  const share = turns(shape, tree.parents);
  const faint = svg("g", { class: "rejected" });
  const strong = svg("g", { class: "accepted" });
  tree.parents.forEach((parent, node) => {
    const group = shape.kept.has(node) ? strong : faint;
    if (parent >= 0) group.append(svg("path", { d: edge(x(parent), y(parent), x(node), y(node), share.get(parent)) }));
  });
  tree.parents.forEach((_, node) => {
    const group = shape.kept.has(node) ? strong : faint;
    const size = shape.kept.has(node) ? radius : radius * 0.8;
    group.append(svg("circle", { cx: x(node), cy: y(node), r: size, class: node === 0 ? "root" : "" }));
  });
  return { faint, strong, x, y };
}

const ROW = 21;
const TOP = 14;
const CHARACTER = 7.3;
const GUESS_CHARACTER = 6.7;
const MAX_LABEL = 13;

/** Returns the length of the longest label on the accepted path. */
export function labelLength(tree) {
  const lengths = tree.accepted.map((node) => [...visible(tree.tokens[node])].length);
  return Math.min(MAX_LABEL, Math.max(3, ...lengths));
}

/** Returns the rejected tokens of each row as one label to the right of the tree, if there is room. */
function rejectedLabels(tree, shape, { x, y, width }) {
  const column = svg("g", { class: "labels guesses" });
  const rows = [];
  tree.parents.forEach((_, node) => shape.kept.has(node) || (rows[shape.depth[node]] ??= []).push(node));
  const left = Math.max(...tree.parents.map((_, node) => x(node))) + 14;
  const room = Math.floor((width - left) / GUESS_CHARACTER);
  if (room < MAX_LABEL) return column;
  for (const row of rows.filter(Boolean)) {
    row.sort((a, b) => shape.lane[a] - shape.lane[b]);
    const label = svg("text", { x: left, y: y(row[0]) });
    label.textContent = shorten(row.map((node) => visible(tree.tokens[node])).join("  "), room);
    column.append(label);
  }
  return column;
}

/**
 * Renders the tree in `host`, with room for `levels` and for labels of `labelLength` characters, so that the layout
 * does not move from tree to tree. Calls `onNode(node | null)` for the node under the pointer.
 */
export function renderTree(host, tree, { levels, labelLength: characters, onNode }) {
  const shape = layout(tree);
  const width = Math.max(240, host.clientWidth);
  const labelWidth = characters * CHARACTER;
  const laneWidth = Math.min(28, (width - labelWidth - 24) / Math.max(1, shape.lanes - 1));
  const height = TOP * 2 + (Math.max(levels, shape.levels) - 1) * ROW;
  const { faint, strong, x, y } = nodesAndEdges(tree, shape, { left: labelWidth + 12, top: TOP, laneWidth, rowHeight: ROW, radius: 4 });
  const labels = svg("g", { class: "labels" });
  const targets = svg("g", { class: "targets" });
  tree.parents.forEach((_, node) => {
    if (shape.kept.has(node)) {
      const label = svg("text", { x: labelWidth, y: y(node), class: node === 0 ? "root" : "" });
      label.textContent = shorten(visible(tree.tokens[node]), MAX_LABEL);
      labels.append(label);
    }
    const target = svg("circle", { cx: x(node), cy: y(node), r: Math.min(11, Math.max(6, laneWidth / 2)) });
    target.addEventListener("pointerenter", () => onNode(node));
    target.addEventListener("pointerleave", () => onNode(null));
    targets.append(target);
  });
  const picture = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" }, faint, strong, labels, rejectedLabels(tree, shape, { x, y, width }), targets);
  const text = shape.kept.size > 1 ? [...shape.kept].map((node) => tree.tokens[node]).join("") : tree.tokens[0];
  picture.setAttribute("aria-label", `Draft tree of ${tree.parents.length} nodes, ${shape.kept.size} accepted: ${text}`);
  host.replaceChildren(picture);
}

/** Returns the tree without labels, at most `unit` pixels from node to node. */
export function renderThumbnail(tree, { width, height, unit, radius }) {
  const shape = layout(tree);
  const rowHeight = Math.min(unit, (height - 4 * radius) / Math.max(1, shape.levels - 1));
  const laneWidth = Math.min(unit, (width - 6 * radius) / Math.max(1, shape.lanes - 1));
  const left = (width - (shape.lanes - 1) * laneWidth) / 2;
  const { faint, strong } = nodesAndEdges(tree, shape, { left, top: 2 * radius, laneWidth, rowHeight, radius });
  return svg("svg", { width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" }, faint, strong);
}
