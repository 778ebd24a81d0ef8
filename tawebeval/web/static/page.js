/** The page: which view is open, what is remembered, and how a form becomes an evaluation. */

import { Client } from "./client.js";
import { curlCommand, tawebevalCommand } from "./commands.js";
import { announce, byId, copy, duration, isBusy, said, setBusy } from "./dom.js";
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
let mayList = true; // not with a token for problems alone
const form = new SubmissionForm(showCommands);
const evaluation = new EvaluationView(askForToken);
const listing = new Listing(askForToken);

/** Show the commands that would send the form as it is now. */
function showCommands() {
  const { entries, problem } = form;
  byId("curl").textContent = curlCommand(SERVER, entries, problem, token !== "");
  byId("tawebeval").textContent = tawebevalCommand(SERVER, entries, problem, token !== "");
}

/** Show what the fragment names: the list, or the form and perhaps an evaluation. */
function route() {
  const isListing = mayList && location.hash === "#evaluations";
  byId("to-listing").hidden = !mayList;
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

/** Show where a token is entered, and what is wrong with the one that there is. */
function askForToken(wrong = token ? NOT_TAKEN : "") {
  byId("token-section").hidden = false;
  byId("token-error").textContent = wrong;
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
    const { problem } = form;
    const data = await form.data();
    memory.set("form", form.values);
    const client = new Client({ token, notice });
    const id = await (problem ? client.evaluateProblem(problem, data) : client.evaluate(data));
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

/** Return what a client may choose from; `environments` is null for problems alone. */
async function findChoices(client, tries) {
  const [problems, environments] = await Promise.all([
    collect(client.problems({ tries })),
    client.environments({ tries }).catch((error) => {
      if (error.status === 403) return null;
      throw error;
    }),
  ]);
  if (environments === null && problems.length === 0) {
    throw Object.assign(new Error("The token permits no problem of this server."), { status: 403 });
  }
  return { problems, environments };
}

async function collect(things) {
  const found = [];
  for await (const thing of things) found.push(thing);
  return found;
}

/** Offer these choices wherever they can be made. */
function offer(choices) {
  mayList = choices.environments !== null;
  form.offer(choices);
  listing.offer(choices);
}

/** Offer what a token permits; return what is wrong with it, nothing if the server takes it. */
async function offerWith(given) {
  let client;
  try {
    client = new Client({ token: given });
  } catch {
    return "A token cannot contain such characters.";
  }
  try {
    offer(await findChoices(client, 1));
    return "";
  } catch (error) {
    return error.status === 401 ? NOT_TAKEN : said(error);
  }
}

/** Show what is remembered, and then what the server offers. */
async function begin() {
  form.restore(memory.get("form") ?? {});
  route();
  const given = token;
  try {
    const choices = await findChoices(new Client({ token }));
    if (given !== token) return; // another one was entered meanwhile
    offer(choices);
    if (!mayList) route();
  } catch (error) {
    if (given !== token) return;
    if (error.status === 401) askForToken();
    else if (error.status === 403) askForToken(said(error));
    else form.showError(said(error));
  }
}

/** Use another token, unless something is wrong with it, and put the focus where it is of use. */
async function takeToken(given) {
  const button = byId("token-submit");
  if (isBusy(button)) return;
  setBusy(button, true);
  byId("token-error").textContent = "";
  const wrong = await offerWith(given);
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
begin();
