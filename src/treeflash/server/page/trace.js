// The steps of one answer as they arrive, and what can be read off them; knows no elements.

import { labelLength } from "./tree.js";

const TREES_KEPT = 240;
// Steps a point of the curves averages over: one step's outcome is noise to the eye.
const WINDOW = 8;

export class Trace {
  constructor() {
    this.trees = [];
    this.steps = 0;
    this.tokens = 0;
    this.levels = 8;
    this.labelLength = 3;
    this.speeds = [];
    this.lengths = [];
    this.stats = null;
    this.recent = [];
    this.elapsed = 0;
  }

  add(tree) {
    const accepted = new Set([0, ...tree.accepted]).size;
    this.steps += 1;
    this.tokens += accepted;
    this.elapsed += tree.step_ms / 1000;
    this.recent.push([accepted, tree.step_ms]);
    if (this.recent.length > WINDOW) this.recent.shift();
    const count = this.recent.reduce((sum, [tokens]) => sum + tokens, 0);
    const time = this.recent.reduce((sum, [, milliseconds]) => sum + milliseconds, 0);
    if (time > 0) this.speeds.push([this.elapsed, (count * 1000) / time]);
    this.lengths.push([this.elapsed, count / this.recent.length]);
    // A step of the root alone guessed nothing: there is no tree to look at.
    if (tree.parents.length < 2) return;
    this.trees.push({ ...tree, number: this.steps });
    if (this.trees.length > TREES_KEPT) this.trees.shift();
    this.levels = Math.max(this.levels, depthOf(tree.parents));
    this.labelLength = Math.max(this.labelLength, labelLength(tree));
  }

  /** Tokens a second: the server's figure once it is known, before that what the steps took. */
  get speed() {
    return this.stats?.decode_tok_s || this.stats?.tok_s || (this.elapsed ? this.tokens / this.elapsed : 0);
  }

  get length() {
    return this.stats?.acceptance_length || (this.steps ? this.tokens / this.steps : 0);
  }
}

function depthOf(parents) {
  const depth = [];
  parents.forEach((parent, node) => (depth[node] = parent < 0 ? 1 : depth[parent] + 1));
  return Math.max(1, ...depth);
}

/** Where two answers part: -1 when they are the same text. */
export function firstDifference(one, other) {
  if (one === other) return -1;
  let place = 0;
  while (place < one.length && one[place] === other[place]) place++;
  return place;
}
