/** The page: which view is open, what is remembered, and how a form becomes an evaluation. */

import { Client } from "./client.js";
import { curlCommand, tawebevalCommand } from "./commands.js";
import { announce, byId, copy, duration, isBusy, setBusy } from "./dom.js";
import { EvaluationView } from "./evaluation.js";
import { SubmissionForm } from "./form.js";
import { Listing } from "./listing.js";

const SERVER = new URL("..", import.meta.url); // also below a path of a proxy's
const NOT_TAKEN = "The server does not accept this token.";
const FRAGMENT = /^#evaluation\/((?:[a-z0-9]{1,16}-)?[a-z2-7]{40})$/;

/** What this browser keeps for this server; nothing where it may not keep anything. */
const memory = {
  get(name) {
    try {
      return JSON.parse(localStorage.getItem(`tawebeval ${SERVER.pathname} ${name}`));
    } catch {
      return null;
    }
  },
  set(name, value) {
    try {
      const key = `tawebeval ${SERVER.pathname} ${name}`;
      if (value === null) localStorage.removeItem(key);
      else localStorage.setItem(key, JSON.stringify(value));
    } catch {
      // it works without
    }
  },
};

let token = memory.get("token") ?? "";
const form = new SubmissionForm(showCommands);
const evaluation = new EvaluationView(askForToken);
const listing = new Listing(askForToken);

/** Show the commands that would send the form as it is now. */
function showCommands() {
  const { entries } = form;
  byId("curl").textContent = curlCommand(SERVER, entries, token !== "");
  byId("tawebeval").textContent = tawebevalCommand(SERVER, entries, token !== "");
}

/** Show what the fragment names: the list, or the form and perhaps an evaluation. */
function route() {
  const isListing = location.hash === "#evaluations";
  byId("listing-view").hidden = !isListing;
  byId("evaluate-view").hidden = isListing;
  byId("to-listing").ariaCurrent = isListing ? "page" : "false";
  byId("to-evaluate").ariaCurrent = isListing ? "false" : "page";
  if (isListing) return listing.open(token);
  listing.close();
  const id = FRAGMENT.exec(location.hash)?.[1];
  byId("to-evaluate").href = id === undefined ? "#" : location.hash; // from the list back to it
  if (id === undefined) evaluation.close();
  else if (id !== evaluation.id) show(id);
}

/** Follow an evaluation, and let it be seen. */
function show(id) {
  evaluation.open(id, token);
  const place = byId("evaluation");
  place.focus({ preventScroll: true });
  // Where it stands below the form it would not be seen.
  if (place.getBoundingClientRect().top > innerHeight / 2) place.scrollIntoView();
}

/** Show where a token is entered: there is none, or not one that the server takes. */
function askForToken() {
  byId("token-section").hidden = false;
  byId("token-error").textContent = token ? NOT_TAKEN : "";
  byId("token-remember").checked = memory.get("token") !== null;
  byId("token").focus();
}

/** Send the form, and show the evaluation that it begins. */
async function submit() {
  const button = byId("submit");
  const progress = byId("form-progress");
  if (isBusy(button)) return;
  setBusy(button, true);
  form.clearError();
  const notice = (pause) => {
    progress.textContent = pause
      ? `Retrying in ${duration(pause.seconds)}: ${pause.why}`
      : "Sending …";
  };
  notice(null);
  try {
    const data = await form.data();
    memory.set("form", form.values);
    const id = await new Client({ token, notice }).evaluate(data);
    location.hash = `#evaluation/${id}`;
    announce("The evaluation has started.");
  } catch (error) {
    if (error.status === 401) return askForToken();
    form.showError(said(error), error.field ?? error.problem?.field);
  } finally {
    progress.textContent = "";
    setBusy(button, false);
  }
}

/** Return what is to be said of an error of a request. */
function said(error) {
  const lost = error instanceof TypeError; // what fetch throws
  return lost ? "The server does not answer." : error.message;
}

/** Return what is wrong with a token; nothing if the server takes it. */
async function wrongWith(given) {
  let client;
  try {
    client = new Client({ token: given });
  } catch {
    return "A token cannot contain such characters.";
  }
  try {
    await client.evaluations({ tries: 1 }).next();
    return "";
  } catch (error) {
    return error.status === 401 ? NOT_TAKEN : said(error);
  }
}

/** Use another token, unless something is wrong with it, and put the focus where it is of use. */
async function takeToken(given) {
  const button = byId("token-submit");
  if (isBusy(button)) return;
  setBusy(button, true);
  byId("token-error").textContent = "";
  const wrong = await wrongWith(given);
  byId("token-error").textContent = wrong;
  setBusy(button, false);
  if (wrong) return byId("token").focus();
  token = given;
  memory.set("token", byId("token-remember").checked ? token : null);
  byId("token").value = "";
  byId("token-section").hidden = true;
  form.clearError();
  showCommands();
  evaluation.close(); // to be opened again
  route();
  if (!byId("listing-view").hidden) byId("main").focus();
  else if (evaluation.id === null) byId("submit").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});

byId("token-form").addEventListener("submit", (event) => {
  event.preventDefault();
  takeToken(byId("token").value.trim());
});

for (const button of document.querySelectorAll("[data-copies]")) {
  const { copies } = button.dataset;
  button.addEventListener("click", () => copy(button, byId(copies).textContent));
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault(); // the fragment says what is shown
  byId("main").focus();
});

addEventListener("hashchange", route);
form.restore(memory.get("form") ?? {});
route();
