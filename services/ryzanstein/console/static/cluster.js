// The page of the cluster. Figures such as tokens/s have a column where nodes tell them.

import { byId, fill, make, setText } from "./dom.js";

const bad = (text) => [text, text ? "bad" : ""];
const time = (seconds) => new Date(seconds * 1000).toLocaleTimeString();
const size = (bytes) => (bytes ? `${(bytes / 2 ** 20).toFixed(0)} MiB` : "");

export class Cluster {
  constructor(socket) {
    this.socket = socket;
    this.shown = false;
    this.at = 0;
    setInterval(() => this.age(), 1000);
  }

  show(shown) {
    this.shown = shown;
    this.socket.tell({ t: "cluster", watched: shown });
  }

  welcome() {
    if (this.shown) this.show(true);
  }

  cluster(state) {
    this.at = Date.now();
    this.asked = `as ${state.router} at ${state.asked} and the orchestrator say`;
    this.age();
    const problems = state.problems.length
      ? state.problems.map((text) => make("li", { textContent: text }))
      : [make("li", { className: "fine", textContent: "none" })];
    const list = byId("problems");
    if (list.textContent !== problems.map((each) => each.textContent).join("")) list.replaceChildren(...problems);
    this.nodes(state.nodes);
    fill(byId("routers"), ["router", "address", "state"],
      (state.routers ?? []).map((router) => [router.id, router.address, router.draining ? bad("drains") : "serves"]));
    fill(byId("links"), ["node", "link", "breaker", "suspicion", "in flight", "why not"],
      state.links.map((link) => [link.node, link.up ? "up" : bad("down"), link.breaker === "closed" ? "closed" : bad(link.breaker),
        bad(link.suspicion), link.inflight, bad(link.failure)]));
    fill(byId("models"), ["model", "context", "ready nodes"],
      state.models.map((model) => [model.name, model.context, model.ready ? model.ready : bad("none")]));
    fill(byId("losses"), ["time", "node", "cause", "in flight"],
      state.losses.map((loss) => [time(loss.time), loss.node, loss.cause, loss.inflight]).reverse());
  }

  nodes(nodes) {
    const names = [...new Set(nodes.flatMap((node) => Object.keys(node.figures)))];
    const figures = (node) => names.map((name) => node.figures[name] ?? "");
    const table = byId("nodes");
    if (table.tHead && table.tHead.rows[0].cells.length !== 6 + names.length) table.replaceChildren();
    fill(table, ["node", "state", "model", "engine", "restarts", "what is wrong", ...names],
      nodes.map((node) => [node.id, node.state === "ready" && !node.draining ? "ready" : bad(node.draining ? `${node.state}, drain asked` : node.state),
        node.model, node.engine, node.restarts, bad(node.error ? `does not answer: ${node.error}` : node.reason), ...figures(node)]));
    fill(byId("ranks"), ["node", "rank", "process", "phase", "step", "last step", "no progress for", "memory"],
      nodes.flatMap((node) => node.ranks.map((rank) => [node.id, rank.rank, rank.pid, rank.phase, rank.step, `${rank.step_ms} ms`,
        rank.phase !== "idle" && rank.still_s >= 1 ? bad(`${rank.still_s} s`) : "", size(rank.bytes)])));
  }

  /** Says how old the figures are: what is silent does not look like what is well. */
  age() {
    if (!this.shown || !this.at) return;
    const seconds = Math.round((Date.now() - this.at) / 1000);
    setText(byId("cluster-asked"), seconds > 3 ? `no news for ${seconds} s; ${this.asked}` : this.asked);
  }
}
