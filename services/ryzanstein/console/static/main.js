// Logging in, the pages, and the keys.

import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { DetailsPage } from "./details.js";
import { byId, setText, the } from "./dom.js";
import { Socket } from "./socket.js";

const PAGES = ["chat", "cluster", "answer", "help"];
const post = (/** @type {string} */ path, /** @type {object} */ body = {}) =>
  fetch(new URL(path, document.baseURI), { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });

/** @type {Record<string, (message: any) => void>} */
const on = {
  state(/** @type {string} */ text) {
    const connected = text === "connected";
    setText(byId("connection"), text);
    byId("connection").classList.toggle("lost", !connected);
    if (text === "logged out") askForLogin("You were logged out.");
  },
  failed: (text) => chat.notice(text),
  welcome(message) {
    byId("connection").title = `routers: ${message.routers}`;
    chat.welcome(message);
    cluster.welcome();
    details.welcome();
    route();
  },
  answer: (frame) => chat.answer(frame),
  turn: (turn) => chat.turn(turn),
  opened: (message) => chat.opened(message),
  stale: (message) => chat.stale(message),
  sessions: (message) => chat.sessions(message),
  models: (message) => chat.models(message),
  cluster: (message) => cluster.cluster(message),
  history: (message) => cluster.history(message),
  details: (message) => details.details(message),
};
const socket = new Socket(on);
const chat = new Chat(socket);
const cluster = new Cluster(socket);
const details = new DetailsPage(socket);

/** Returns what stands behind a slash of the fragment; empty if it cannot be read. @param {string | undefined} text */
function named(text) {
  try {
    return decodeURIComponent(text ?? "");
  } catch {
    return "";
  }
}

/** Shows the page that the fragment names: #chat, #s/SESSION, #cluster, #answer/ID or #help. */
function route() {
  const [name, what] = location.hash.slice(1).split("/");
  const page = PAGES.includes(name) ? name : "chat";
  for (const each of PAGES) byId(each).hidden = each !== page;
  for (const link of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("#top nav a"))) {
    if (link.dataset.page === page) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (cluster.shown !== (page === "cluster")) cluster.show(page === "cluster");
  details.show(name === "answer" ? named(what) : "");
  const wanted = name === "s" ? named(what) : "";
  if (wanted && wanted !== chat.session) chat.open(wanted);
}

/** @returns {Promise<{login: string, entered: boolean}>} */
const me = async () => (await fetch(new URL("me", document.baseURI))).json();

/** @param {string} why @param {string} [login] */
async function askForLogin(why, login) {
  login ??= (await me()).login;
  for (const each of PAGES) byId(each).hidden = true;
  byId("login").hidden = false;
  byId("login-form").hidden = login !== "key";
  const how = login === "key" ? "" : "Open the link that the console printed when it started. It works once, for ten minutes; kill -USR1 makes it print another.";
  setText(byId("login-why"), `${why} ${how}`.trim());
  if (login === "key") byId("key").focus();
}

/** @param {boolean} byKey */
function enter(byKey) {
  byId("login").hidden = true;
  byId("logout").hidden = !byKey;
  route();
  socket.connect();
  byId("question").focus();
}

byId("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const key = the("input", "key").value.trim();
  the("input", "key").value = "";
  const answer = await post("login", { key });
  if (answer.ok) enter(true);
  else setText(byId("login-why"), await answer.text());
});

byId("logout").addEventListener("click", async () => {
  await post("logout");
  location.reload();
});

/** Goes to the question, from whatever page. @param {() => void} before */
function toQuestion(before) {
  before();
  location.hash = the("a", "to-chat").hash;
  route();
  byId("question").focus();
}

addEventListener("hashchange", route);
addEventListener("keydown", (event) => {
  if (event.key === "Escape") chat.stop();
  else if (event.altKey && event.code === "KeyN") toQuestion(() => chat.begin());
  else if (event.altKey && event.code === "KeyQ") toQuestion(() => {});
  else return;
  event.preventDefault();
});

async function start() {
  const token = new URLSearchParams(location.hash.slice(1)).get("t");
  let why = "";
  if (token) {
    history.replaceState(null, "", location.pathname + location.search);
    const answer = await post("login", { token });
    if (answer.ok) return enter(false);
    why = `The login failed: ${await answer.text()}.`;
  }
  const { login, entered } = await me();
  if (entered) enter(login === "key");
  else await askForLogin(why, login);
}

start().catch((error) => on.state(`the console is not reachable: ${error.message}`));
