// The steps of one answer as they arrive, and their statistics.

import { labelLength } from "./tree.js";

const MAX_TREES = 240;
// Steps that each point of the curves averages over: single steps are too noisy to read.
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
    // A step with the root alone has no tree to show.
    if (tree.parents.length < 2) return;
    this.trees.push({ ...tree, number: this.steps });
    if (this.trees.length > MAX_TREES) this.trees.shift();
    this.levels = Math.max(this.levels, depthOf(tree.parents));
    this.labelLength = Math.max(this.labelLength, labelLength(tree));
  }

  /** Returns tokens a second: from the steps so far, then from the server's statistics. */
  get speed() {
    return this.stats?.decode_tok_s || this.stats?.tok_s || (this.elapsed ? this.tokens / this.elapsed : 0);
  }

  /** Returns what is known of an answer that was stopped, in the form of the server's statistics. */
  get partial() {
    return this.tokens ? { decode_tok_s: this.speed, acceptance_length: this.length, generated_tokens: this.tokens } : null;
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

/** Returns the index at which two texts diverge, -1 if they are identical. */
export function firstDifference(one, other) {
  if (one === other) return -1;
  let index = 0;
  while (index < one.length && one[index] === other[index]) index++;
  return index;
}
