// The page of the cluster. Figures such as tokens/s have a column where nodes tell them.

import { figure } from "./chart.js";
import { byId, fill, make, setText, the } from "./dom.js";
import { colourOf } from "./tree.js";

/** @typedef {import("./wire.js").Point} Point */

/** @param {string | number} text @returns {[string | number, string]} */
const bad = (text) => [text, text ? "bad" : ""];
const time = (/** @type {number} */ seconds) => new Date(seconds * 1000).toLocaleTimeString();
const size = (/** @type {number} */ bytes) => (bytes ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : "");

const KEPT_S = 600;
const HOLE_S = 15; // so long without a look, and a line has a gap

export class Cluster {
  /** @param {import("./socket.js").Socket} socket */
  constructor(socket) {
    this.socket = socket;
    this.shown = false;
    this.at = 0;
    this.asked = "";
    /** @type {Point[]} */
    this.points = [];
    setInterval(() => this.age(), 1000);
  }

  /** @param {boolean} shown */
  show(shown) {
    this.shown = shown;
    this.socket.tell({ t: "cluster", watched: shown });
  }

  welcome() {
    if (this.shown) this.show(true);
  }

  /** @param {import("./wire.js").ClusterState} state */
  cluster(state) {
    this.at = Date.now();
    this.asked = `as ${state.router} at ${state.asked} and the orchestrator say`;
    this.age();
    const problems = state.problems.length
      ? state.problems.map((text) => make("li", { textContent: text }))
      : [make("li", { className: "fine", textContent: "none" })];
    const list = byId("problems");
    if (list.textContent !== problems.map((each) => each.textContent).join("")) list.replaceChildren(...problems);
    this.charts(state.point);
    this.nodes(state.nodes);
    fill(the("table", "routers"), ["router", "address", "state"],
      (state.routers ?? []).map((router) => [router.id, router.address, router.draining ? bad("drains") : "serves"]));
    fill(the("table", "links"), ["node", "link", "breaker", "suspicion", "in flight", "why not"],
      state.links.map((link) => [link.node, link.up ? "up" : bad("down"), link.breaker === "closed" ? "closed" : bad(link.breaker),
        bad(link.suspicion), link.inflight, bad(link.failure)]));
    fill(the("table", "models"), ["model", "context", "ready nodes"],
      state.models.map((model) => [model.name, model.context, model.ready ? model.ready : bad("none")]));
    fill(the("table", "losses"), ["time", "node", "cause", "in flight"],
      state.losses.map((loss) => [time(loss.time), loss.node, loss.cause, loss.inflight]).reverse());
  }

  /** @param {import("./wire.js").Node[]} nodes */
  nodes(nodes) {
    const names = [...new Set(nodes.flatMap((node) => Object.keys(node.figures)))];
    const figures = (/** @type {import("./wire.js").Node} */ node) => names.map((name) => node.figures[name] ?? "");
    const table = the("table", "nodes");
    if (table.tHead && table.tHead.rows[0].cells.length !== 6 + names.length) table.replaceChildren();
    fill(table, ["node", "state", "model", "engine", "restarts", "what is wrong", ...names],
      nodes.map((node) => [node.id, node.state === "ready" && !node.draining ? "ready" : bad(node.draining ? `${node.state}, drain asked` : node.state),
        node.model, node.engine, node.restarts, bad(node.error ? `does not answer: ${node.error}` : node.reason), ...figures(node)]));
    fill(the("table", "ranks"), ["node", "rank", "process", "phase", "step", "last step", "no progress for", "memory"],
      nodes.flatMap((node) => node.ranks.map((rank) => [node.id, rank.rank, rank.pid, rank.phase, rank.step, `${rank.step_ms} ms`,
        rank.phase !== "idle" && rank.still_s >= 1 ? bad(`${rank.still_s} s`) : "", size(rank.bytes)])));
  }

  /** Takes the figures of the minutes before this page was opened. @param {{points: Point[]}} message */
  history({ points }) {
    this.points = points;
  }

  /** Draws the last ten minutes. @param {Point} point */
  charts(point) {
    if (point.at > (this.points.at(-1)?.at ?? 0)) this.points.push(point);
    while (this.points[0].at < point.at - KEPT_S) this.points.shift();
    const names = (/** @type {"tokens" | "waiting" | "kv"} */ field) => [...new Set(this.points.flatMap((each) => Object.keys(each[field] ?? {})))].sort();
    /** @param {string} name @param {number} colour @param {(point: Point) => number | undefined} value */
    const line = (name, colour, value) => ({ name, colour, dots: this.dots(value) });
    const to = point.at;
    /** @type {{from: number, to: number, ticks: [number, string][]}} */
    const frame = { from: to - KEPT_S, to, ticks: [[to - KEPT_S, "10 min ago"], [to - KEPT_S / 2, "5 min ago"], [to, "now"]] };
    const made = [
      { title: "Tokens", unit: "a second, by node", lines: names("tokens").map((name) => line(name, colourOf(name), (each) => each.tokens?.[name])) },
      { title: "First token", unit: "ms, of half a minute", lines: [line("half within", 0, (each) => each.first?.[0]), line("95 % within", 1, (each) => each.first?.[1])] },
      { title: "Queue", unit: "sequences", lines: [line("running", 0, (each) => each.running ?? 0), line("not taken by a node", 1, (each) => each.unaccepted),
        ...names("waiting").map((name, at) => line(`waiting, class ${name}`, at + 2, (each) => each.waiting?.[name] ?? 0))] },
      { title: "KV cache", unit: "% of blocks, by node", most: 100, lines: names("kv").map((name) => line(name, colourOf(name), (each) => each.kv?.[name] === undefined ? undefined : each.kv[name] * 100)) },
    ];
    byId("charts").replaceChildren(...made.map((each) => figure({ ...frame, ...each })));
  }

  /** Returns times and values, with a gap where nobody looked. @param {(point: Point) => number | undefined} value */
  dots(value) {
    /** @type {import("./chart.js").Dot[]} */
    const dots = [];
    let before = Infinity;
    for (const point of this.points) {
      if (point.at - before > HOLE_S) dots.push([before, null]);
      dots.push([point.at, value(point) ?? null]);
      before = point.at;
    }
    return dots;
  }

  /** Says how old the figures are: what is silent does not look like what is well. */
  age() {
    if (!this.shown || !this.at) return;
    const seconds = Math.round((Date.now() - this.at) / 1000);
    setText(byId("cluster-asked"), seconds > 3 ? `no news for ${seconds} s; ${this.asked}` : this.asked);
  }
}
