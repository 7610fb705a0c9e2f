// The page of conversations.

import { Answer, uncoloured } from "./answer.js";
import { byId, make, setText, the } from "./dom.js";

const NEAR_END = 48;

/** @typedef {import("./wire.js").Turn} Turn */

export class Chat {
  /** @param {import("./socket.js").Socket} socket */
  constructor(socket) {
    this.socket = socket;
    this.session = "";
    this.process = "";
    /** @type {Map<string, Answer>} */
    this.answers = new Map();
    /** @type {import("./wire.js").Frame[]} */
    this.frames = [];
    this.turns = byId("turns");
    this.question = the("textarea", "question");
    /** @type {{session: string, rows: HTMLElement[]} | null} */
    this.pending = null;
    byId("ask").addEventListener("submit", (event) => this.submit(event));
    this.question.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) this.submit(event);
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("retry").addEventListener("click", () => this.retry());
    byId("new").addEventListener("click", () => this.begin());
    document.addEventListener("visibilitychange", () => socket.tell({ t: "visible", visible: !document.hidden }));
    if (matchMedia("(max-width: 44rem)").matches) the("details", "sessions-fold").open = false;
  }

  /** The connection is there, perhaps again. After a restart of the console nothing is as it was. @param {{process: string}} message */
  welcome({ process }) {
    this.paint();
    if (this.process !== process) this.answers.clear();
    this.process = process;
    this.socket.tell({ t: "visible", visible: !document.hidden });
    this.socket.call({ t: "models" }).catch(() => {});
    this.list();
    if (this.session) this.open(this.session);
  }

  /** @param {{models: import("./wire.js").Model[]}} message */
  models({ models }) {
    const select = the("select", "model");
    const chosen = select.value;
    const one = models.length === 1;
    const options = models.map(({ name }) => make("option", { value: name, textContent: name }));
    select.replaceChildren(...(one ? [] : [make("option", { value: "", textContent: "choose one" })]), ...options);
    select.value = models.some(({ name }) => name === chosen) ? chosen : select.options[0]?.value ?? "";
  }

  list() {
    this.socket.call({ t: "sessions" }).catch((error) => this.notice(error.message));
  }

  /** @param {{sessions: import("./wire.js").SessionRow[], cut?: boolean}} message */
  sessions({ sessions, cut }) {
    const rows = sessions.map((row) => {
      const label = row.title || row.session;
      const when = row.running ? "answering" : new Date(row.updated * 1000).toLocaleString();
      const link = make("a", { href: `#s/${encodeURIComponent(row.session)}`, title: label }, label, make("small", { textContent: when }));
      if (row.session === this.session) link.setAttribute("aria-current", "page");
      const away = make("button", { type: "button", textContent: "×", title: "Delete", "aria-label": `Delete ${label}` });
      away.addEventListener("click", () => this.delete(row.session, label));
      return make("li", {}, link, away);
    });
    if (cut) rows.push(make("li", { className: "dim", textContent: "older ones are not listed" }));
    const list = byId("session-list");
    const places = () => /** @type {HTMLElement[]} */ ([...list.querySelectorAll("a, button")]);
    const focused = places().findIndex((each) => each === document.activeElement);
    list.replaceChildren(...rows);
    if (focused >= 0) places()[focused]?.focus();
  }

  /** @param {string} session @param {string} label */
  delete(session, label) {
    if (!confirm(`Delete the conversation "${label}" from the cluster?`)) return;
    this.socket.call({ t: "delete", session }).then(() => {
      if (session === this.session) this.begin();
      this.list();
    }, (error) => this.notice(error.message));
  }

  /** Begins a new conversation. */
  begin() {
    this.session = "";
    this.answers.clear();
    this.turns.replaceChildren();
    this.socket.tell({ t: "leave" });
    location.hash = "#chat";
    this.mark();
    this.question.focus();
  }

  /** Shows a session. Answers that are here already keep their elements, and get what is new. @param {string} session */
  open(session) {
    this.session = session;
    this.pending = { session, rows: [] };
    this.socket.call({ t: "open", session }).then(() => this.opened_(), (error) => {
      this.pending = null;
      this.notice(error.message);
    });
    this.mark();
  }

  /** @param {{session: string}} message */
  stale({ session }) {
    if (session === this.session) this.open(session);
  }

  /** @param {{note?: string}} message */
  opened({ note }) {
    this.notice(note ?? "");
  }

  opened_() {
    if (!this.pending) return;
    const { rows, session } = this.pending;
    this.pending = null;
    if (session !== this.session) return;
    this.turns.replaceChildren(...rows);
    this.turns.scrollTop = this.turns.scrollHeight;
    this.mark();
  }

  /** @param {Turn} turn */
  turn(turn) {
    if (turn.session !== this.session) return;
    const follows = this.atEnd();
    const element = this.elementOf(turn);
    if (this.pending) this.pending.rows.push(element);
    else {
      this.turns.append(element);
      if (follows || turn.role !== "assistant") this.scroll();
    }
    this.mark();
  }

  /** @param {Turn} turn */
  elementOf(turn) {
    this.paint(); // so that the versions are those of what has come
    if (turn.answer) {
      const answer = this.answers.get(turn.answer) ?? new Answer(turn.answer, (results) => this.give(results));
      this.answers.set(turn.answer, answer);
      this.socket.tell({ t: "watch", answer: turn.answer, version: answer.version });
      return answer.element;
    }
    if (turn.role === "assistant") return uncoloured(turn.blocks ?? [], turn.asked);
    for (const answer of this.answers.values()) answer.settle();
    return make("p", { className: turn.role === "tool" ? "question result" : "question", textContent: turn.question ?? "", "aria-label": turn.role ?? "user" });
  }

  /** Takes what is new of an answer: it is shown with the next picture, and all that came by then at once. @param {import("./wire.js").Frame} frame */
  answer(frame) {
    if (!this.frames.length) requestAnimationFrame(() => this.paint());
    this.frames.push(frame);
  }

  paint() {
    const frames = this.frames.splice(0);
    if (!frames.length) return;
    const follows = this.atEnd();
    let ended = false;
    for (const frame of frames) {
      const answer = this.answers.get(frame.id);
      if (!answer) continue;
      const ran = !answer.over;
      answer.apply(frame);
      ended ||= ran && answer.over;
    }
    if (follows) this.scroll();
    if (ended) this.list();
    this.mark();
  }

  /** The last answer of the conversation, if it is one of those that the console keeps. */
  get last() {
    return [...this.answers.values()].findLast((answer) => answer.element.isConnected);
  }

  /** @param {Event} event */
  submit(event) {
    event.preventDefault();
    const text = this.question.value.trim();
    if (!text) return;
    this.ask({ t: "ask", text, session: this.session, sampling: this.sampling() }, () => {
      this.question.value = "";
    });
  }

  /** Gives the assistant what its tools returned, and lets it go on. @param {{id: string, name: string, content: string}[]} results */
  give(results) {
    this.ask({ t: "ask", results, session: this.session, sampling: this.sampling() }, () => this.question.focus());
  }

  retry() {
    if (this.session) this.ask({ t: "retry", session: this.session, sampling: this.sampling() }, () => this.question.focus());
  }

  /** @param {Record<string, unknown>} message @param {() => void} done */
  ask(message, done) {
    this.notice("");
    this.socket.call(message).then(({ session }) => {
      done();
      if (session !== this.session) location.hash = `#s/${encodeURIComponent(session)}`;
      this.list();
    }, (error) => this.notice(error.message));
  }

  stop() {
    const answer = this.last;
    if (answer && !answer.over) this.socket.call({ t: "stop", answer: answer.id }).catch((error) => this.notice(error.message));
  }

  sampling() {
    /** @type {Record<string, string | number>} */
    const sampling = { model: the("select", "model").value, tools: the("textarea", "tools").value, tool_choice: the("select", "tool-choice").value };
    const tokens = the("input", "max-tokens").valueAsNumber;
    const temperature = the("input", "temperature").valueAsNumber;
    if (Number.isFinite(tokens)) sampling.max_tokens = tokens;
    if (Number.isFinite(temperature)) sampling.temperature = temperature;
    return sampling;
  }

  /** Shows what can be done now. A button that has the focus is not taken away from under it. */
  mark() {
    const last = this.last;
    const running = Boolean(last && !last.over);
    for (const { id, usable } of [{ id: "stop", usable: running && last?.status !== "stopping" }, { id: "retry", usable: Boolean(this.session) && !running }]) {
      const button = the("button", id);
      if (!usable && document.activeElement === button) this.question.focus();
      button.disabled = !usable;
    }
    the("a", "to-chat").href = this.session ? `#s/${encodeURIComponent(this.session)}` : "#chat";
    for (const link of byId("session-list").querySelectorAll("a")) {
      const here = link.getAttribute("href") === `#s/${encodeURIComponent(this.session)}`;
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  atEnd() {
    return this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < NEAR_END;
  }

  scroll() {
    this.turns.scrollTop = this.turns.scrollHeight;
  }

  /** @param {string} text */
  notice(text) {
    setText(byId("notice"), text);
  }
}
