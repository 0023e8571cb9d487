// The speculation panel: throughput curves, recent trees, comparison with plain decoding.

import { renderChart } from "./chart.js";
import { element } from "./messages.js";
import { renderThumbnail, renderTree, visible } from "./tree.js";

const THUMBNAIL = { width: 40, height: 42, unit: 4, radius: 1.3 };
// Faster updates cannot be read; with reduced motion the panel updates once a second.
const FRAME_MS = 140;
const CALM_FRAME_MS = 1000;

const SKETCH = {
  parents: [-1, 0, 1, 2, 3, 4, 0, 6, 1, 8, 8, 3, 11, 3, 13],
  accepted: [0, 1, 2, 3, 4],
};

const $ = (id) => document.getElementById(id);
const oneDigit = (value) => value.toLocaleString("en", { maximumFractionDigits: 1, minimumFractionDigits: 1 });
const twoDigits = (value) => value.toLocaleString("en", { maximumFractionDigits: 2, minimumFractionDigits: 2 });
const speedText = (value) => (value >= 100 ? Math.round(value).toLocaleString("en") : oneDigit(value));

export class Panel {
  constructor() {
    this.trace = null;
    this.pending = null;
    this.plain = null;
    this.comparison = null;
    this.chosen = null;
    this.timer = null;
    this.renderedAt = 0;
    this.rendered = null; // inputs of the tree on screen
    const strip = $("strip");
    strip.addEventListener("click", (event) => this.#choose(Number(event.target.closest("[data-number]")?.dataset.number)));
    strip.addEventListener("keydown", (event) => this.#stripKey(event));
    new ResizeObserver(() => this.#schedule()).observe($("panel"));
    $("sketch").append(renderThumbnail(SKETCH, { width: 200, height: 150, unit: 22, radius: 4 }));
  }

  /** Sets a new answer's trace; the previous one stays until the first step arrives, so that nothing flickers. */
  show(trace) {
    this.pending = trace;
    this.#schedule();
  }

  clear() {
    this.#replace(null);
    this.#schedule();
  }

  #replace(trace) {
    Object.assign(this, { trace, pending: null, plain: null, comparison: null, chosen: null });
  }

  refresh() {
    this.#schedule();
  }

  /** `comparison`: {state: running | done | stopped | failed, plain: Trace, characters, difference, message}. */
  compare(comparison) {
    if (this.pending) this.#replace(this.pending);
    this.comparison = comparison;
    this.plain = comparison?.plain ?? null;
    this.#schedule();
  }

  #schedule() {
    if (this.timer !== null) return;
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const wait = Math.max(0, this.renderedAt + (calm ? CALM_FRAME_MS : FRAME_MS) - performance.now());
    this.timer = setTimeout(() => {
      this.timer = null;
      this.renderedAt = performance.now();
      this.#render();
    }, wait);
  }

  #render() {
    if (this.pending?.steps) this.#replace(this.pending);
    const anything = Boolean(this.trace?.steps || this.comparison);
    $("panel-empty").hidden = anything;
    $("panel-body").hidden = !anything;
    if (!anything || !$("panel").checkVisibility()) return;
    this.#renderCurves();
    this.#renderStrip();
    this.#renderTree();
    this.#renderComparison();
  }

  #renderCurves() {
    const { trace, plain } = this;
    $("speed-now").textContent = trace.speed ? speedText(trace.speed) : "–";
    $("length-now").textContent = trace.length ? twoDigits(trace.length) : "–";
    const speeds = [{ className: "tree-line", points: trace.speeds }];
    if (plain) speeds.unshift({ className: "plain", points: plain.speeds });
    const round = (value) => Math.round(value).toLocaleString("en");
    renderChart($("speed-chart"), speeds, { label: `Tokens a second over time, ${speedText(trace.speed)} on average`, format: round });
    renderChart($("length-chart"), [{ className: "tree-line", points: trace.lengths }], {
      label: `Tokens accepted per step over time, ${twoDigits(trace.length)} on average`,
      format: (value) => (Number.isInteger(value) ? String(value) : oneDigit(value)),
    });
  }

  /** Returns how many thumbnails fit in a row. */
  #thumbnails() {
    return Math.max(4, Math.floor($("tree").clientWidth / (THUMBNAIL.width + 4)));
  }

  #renderStrip() {
    $("strip").hidden = !this.trace.trees.length;
    const last = this.trace.trees.slice(-this.#thumbnails());
    if (this.chosen !== null && !last.some((tree) => tree.number === this.chosen.number)) last.splice(0, 1, this.chosen);
    const shownNumber = this.#shownTree()?.number;
    $("strip").replaceChildren(...last.map((tree) => {
      const option = element("div", { className: "thumbnail", id: `tree-${tree.number}`, dataset: { number: tree.number } });
      option.append(renderThumbnail(tree, THUMBNAIL));
      option.setAttribute("role", "option");
      option.setAttribute("aria-selected", String(tree.number === shownNumber));
      option.setAttribute("aria-label", `Step ${tree.number}: accepted ${tree.accepted.length} of ${tree.parents.length}`);
      return option;
    }));
    if (shownNumber) $("strip").setAttribute("aria-activedescendant", `tree-${shownNumber}`);
  }

  #shownTree() {
    return this.chosen ?? this.trace.trees.at(-1);
  }

  #renderTree() {
    const tree = this.#shownTree();
    if (!tree) {
      this.rendered = null;
      $("readout").replaceChildren();
      $("tree").replaceChildren(element("p", { className: "note" }, "None yet: every step so far was a single token, because no draft was expected to pay off, or the tree size is 0."));
      return;
    }
    // Keep an unchanged tree, and with it the readout of the node under the pointer.
    const inputs = [tree, this.trace.levels, this.trace.labelLength, $("tree").clientWidth];
    if (this.rendered?.every((value, index) => value === inputs[index])) return;
    this.rendered = inputs;
    renderTree($("tree"), tree, { levels: this.trace.levels, labelLength: this.trace.labelLength, onNode: (node) => this.#readout(tree, node) });
    this.#readout(tree, null);
  }

  #readout(tree, node) {
    const kept = new Set([0, ...tree.accepted]);
    const host = $("readout");
    if (node === null) {
      const step = `Step ${tree.number.toLocaleString("en")}`;
      host.replaceChildren(`${step}: accepted ${kept.size} of ${tree.parents.length}, ${oneDigit(tree.step_ms)} ms`);
      return;
    }
    const verdict = node === 0 ? "was committed by the step before" : kept.has(node) ? "was accepted" : "was rejected";
    host.replaceChildren(element("code", {}, visible(tree.tokens[node])), ` ${verdict}`);
  }

  #choose(number) {
    if (!number) return;
    const tree = this.trace.trees.find((candidate) => candidate.number === number);
    // Choosing the last tree resumes following.
    this.chosen = tree && tree !== this.trace.trees.at(-1) ? tree : null;
    this.renderedAt = 0;
    this.#schedule();
  }

  #stripKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (!move || !this.trace?.trees.length) return;
    event.preventDefault();
    const { trees } = this.trace;
    const at = trees.indexOf(this.#shownTree());
    const next = Math.min(trees.length - 1, Math.max(0, trees.length - this.#thumbnails(), at + move));
    this.#choose(trees[next].number);
  }

  #renderComparison() {
    const { comparison, trace } = this;
    const host = $("versus");
    if (!comparison) {
      const said = $("compare").checked ? "Each answer is repeated without trees once it is complete." : "Generates the same answer again, one token a step.";
      host.replaceChildren(element("p", { className: "note" }, said));
      return;
    }
    const { plain } = comparison;
    const most = Math.max(trace.speed, plain.speed, 1e-9);
    const bar = (name, className, speed) => {
      const fill = element("span", { className: `fill ${className}` });
      fill.style.width = `${(100 * speed) / most}%`;
      return element("div", { className: "versus-row" }, element("span", {}, name), element("span", { className: "track" }, fill), element("output", {}, speed ? speedText(speed) : "–"));
    };
    host.replaceChildren(bar("Tree", "tree-line", trace.speed), bar("Plain", "plain", plain.speed), this.#verdict());
  }

  #verdict() {
    const { comparison, trace } = this;
    const line = element("p", { className: "verdict" });
    const characters = comparison.characters?.toLocaleString("en");
    if (comparison.state === "running") line.append(`Repeating without trees: ${characters} characters so far.`);
    else if (comparison.state === "stopped") line.append("Stopped before the end.");
    else if (comparison.state === "failed") line.append(comparison.message);
    else {
      const factor = trace.speed / comparison.plain.speed;
      if (Number.isFinite(factor)) line.append(element("strong", {}, `${oneDigit(factor)} times as fast. `));
      if (comparison.difference < 0) line.append(`Same text, all ${characters} characters.`);
      else line.append(`The texts diverge at character ${(comparison.difference + 1).toLocaleString("en")}. On a GPU that can happen where two tokens are almost equally likely.`);
      line.classList.toggle("same", comparison.difference < 0);
    }
    return line;
  }
}
