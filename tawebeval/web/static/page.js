/** The page: which view is open, what is remembered, and how a form becomes an evaluation. */

import { ClassView } from "./class.js";
import { Client } from "./client.js";
import { curlCommand, tawebevalCommand } from "./commands.js";
import { announce, byId, copy, isBusy, pauseWords, said, setBusy, setOptions } from "./dom.js";
import { extensionOf } from "./editor.js";
import { EvaluationView } from "./evaluation.js";
import { OWN_INPUT, SubmissionForm } from "./form.js";
import { addEntry, nameFiles, readEntries } from "./history.js";
import { language, languages, nameLanguage, say, translateDocument } from "./language.js";
import { Listing } from "./listing.js";
import { memory } from "./memory.js";
import { ProblemList, StatementView, nextOpening, timeWords } from "./problems.js";
import { readSharedFragment } from "./share.js";
import { Standings } from "./standings.js";

const SERVER = new URL("..", import.meta.url); // also below a path of a proxy's
const IDENTIFIER = /^((?:[a-z0-9]{1,16}-)?[a-z2-7]{40})$/;
const LOOK_AGAIN = 60_000; // ms between two looks at the time, at most
const SAVED_AFTER = 500; // ms after the last change of a draft
const LONGEST_DRAFT = 256 * 1024; // characters of JSON

translateDocument();

let token = history.state?.token ?? memory.get("token") ?? "";
history.replaceState(null, ""); // the token came from before a change of the language
let hasBegun = false; // not on a shared page, which needs no token
let choices = null; // what the token permits; null while the server has not said it
let routed = ""; // the fragment that was shown last
let shownView = ""; // what it named
let saving; // timer of the draft
let isSending = false;
let opening; // timer of a problem that is closed
let aheadBy = 0; // ms that the server's clock is before this one
const form = new SubmissionForm(takeChange);
const evaluation = new EvaluationView({
  unauthorized: askForToken,
  rerun: rememberRerun,
  opened: showFormOf,
  edit: editSubmission,
  mark: (marks) => form.mark(marks),
  findDetails: (id) => ({
    titles: new Map(choices?.problems.map(({ name, title }) => [name, title])),
    file: readEntries(memory.get("history")).find((entry) => entry.id === id)?.file,
  }),
});
const listing = new Listing(askForToken, rememberRerun);
const classView = new ClassView(() => token);
const standings = new Standings(askForToken);
const problems = new ProblemList();
const statement = new StatementView();

/** Show the commands that would send the form as it is now, and keep a draft of it. */
function takeChange() {
  const { entries, problem } = form;
  const name = problem?.name ?? "";
  byId("curl").textContent = curlCommand(SERVER, entries, name, token !== "");
  byId("tawebeval").textContent = tawebevalCommand(SERVER, entries, name, token !== "");
  byId("link").textContent = new URL(formFragment(entries, name), SERVER).href;
  clearTimeout(saving);
  if (problem !== null) saving = setTimeout(saveDraft, SAVED_AFTER);
}

/** Return the fragment of a form as it is now, without its submission. */
function formFragment(entries, problem) {
  if (problem) return `#problem/${problem}`;
  const inputs = entries.filter(({ name }) => !/^(submission|metadata)\[/.test(name));
  return `#evaluate?${new URLSearchParams(inputs.map(({ name, value }) => [name, value]))}`;
}

/** Keep what is written for the chosen problem. */
function saveDraft() {
  clearTimeout(saving);
  if (form.problem === null) return;
  const { draft } = form;
  if (JSON.stringify(draft).length > LONGEST_DRAFT) return;
  memory.set(`draft ${form.problem.name}`, draft);
  const extension = extensionOf(draft.find(({ kind }) => kind === "text")?.file ?? "");
  if (extension !== "") memory.set("extension", extension);
}

/** Return the view that a fragment names, as it can be shown: `{ view, argument, query }`. */
function readFragment() {
  const [, view, argument, query] = /^#?([a-z]*)\/?([^?]*)\??(.*)$/.exec(location.hash);
  const isKnown = choices !== null;
  if (view === "evaluation" && IDENTIFIER.test(argument)) return { view, argument };
  if (readSharedFragment(location.hash) !== null) return { view: "shared" };
  if (!isKnown) return { view: "" };
  if (view === "evaluations" || (view === "class" && hasClass())) return { view };
  if (view === "problem" && findProblem(argument) !== undefined) return { view, argument };
  if (choices.environments === null) return { view: "problems" };
  if (view === "evaluate") return { view, query };
  return { view: choices.problems.length > 0 ? "problems" : "evaluate" };
}

/** Whether the token is that of a teacher: not of a student, who submits for problems alone. */
function hasClass() {
  if (choices === null || choices.problems.length === 0) return false;
  return choices.environments !== null || Object.keys(choices.me.supervises).length > 0;
}

function findProblem(name) {
  return choices?.problems.find((problem) => problem.name === name);
}

/** Show what the fragment names. */
function route() {
  const { view, argument, query } = readFragment();
  if (view === "problem") setProblem(findProblem(argument));
  if (view === "evaluate") setProblem(null);
  if (view === "evaluation" && choices !== null) setProblem(findLastProblem());
  if (query && location.hash !== routed) form.prefill(new URLSearchParams(query));
  routed = location.hash;
  const isForm = ["problem", "evaluate", "evaluation", "shared"].includes(view);
  byId("problems-view").hidden = view !== "problems";
  byId("evaluate-view").hidden = !isForm;
  byId("form-section").hidden = choices === null;
  byId("listing-view").hidden = view !== "evaluations";
  byId("class-view").hidden = view !== "class";
  byId("shared-title").hidden = view !== "shared";
  document.body.classList.toggle("of-link", view === "shared");
  byId("to-problems").hidden = !(choices?.problems.length > 0);
  byId("to-evaluate").hidden = choices === null || choices.environments === null;
  byId("to-class").hidden = !hasClass();
  byId("to-listing").hidden = choices === null;
  const isProblem = view === "problems" || (isForm && form.problem !== null);
  byId("to-problems").ariaCurrent = isProblem ? "page" : "false";
  byId("to-evaluate").ariaCurrent = isForm && !isProblem ? "page" : "false";
  byId("to-class").ariaCurrent = view === "class" ? "page" : "false";
  byId("to-listing").ariaCurrent = view === "evaluations" ? "page" : "false";
  byId("forget").hidden = token === "";
  byId("whoami").hidden = !choices?.me.caller;
  byId("whoami").textContent = choices?.me.caller ?? "";
  const missing = /^#problem\/(.*)$/.exec(location.hash)?.[1];
  if (view === "problems" && missing) problems.complain(missing);
  if (view !== shownView && !document.activeElement.checkVisibility()) byId("main").focus();
  shownView = view;
  const kept = { history: readEntries(memory.get("history")), isLocal: choices?.me.shared ?? false };
  standings.close();
  if (view === "evaluations") return listing.open(token, kept);
  listing.close();
  if (view === "class") {
    classView.open();
    standings.open(token);
  }
  // Without the marks the list is as good.
  if (view === "problems") problems.mark(listing.find(token, kept)).catch(() => {});
  // From another view back to it.
  byId("to-evaluate").href = view === "evaluation" && !isProblem ? location.hash : "#evaluate";
  if (view === "shared") return showShared();
  if (view !== "evaluation") evaluation.close();
  else if (argument !== evaluation.id || evaluation.isShared) show(argument, token);
  if (view === "problem") document.title = `${form.problem.title || argument} · tawebeval`;
}

/** Return the problem that the form is for, or was for last; null for an own evaluator. */
function findLastProblem() {
  const first = choices.environments === null ? choices.problems[0] : null;
  return findProblem(form.problem?.name ?? memory.get("problem")) ?? first;
}

/** Let the form be that of a problem, or for null that of an own evaluator. */
function setProblem(problem) {
  if (problem === null) statement.close();
  else statement.open(problem, token);
  memory.set("problem", problem?.name ?? null);
  if (!form.isFor(problem)) {
    saveDraft();
    const draft = problem === null ? [] : (memory.get(`draft ${problem.name}`) ?? []);
    form.choose(problem, draft, memory.get("extension") ?? undefined);
  }
  showOpening();
}

/** Show the form of an evaluation's problem beside it, or the one of an own evaluator. */
function showFormOf({ problem: name }) {
  const problem = name === null ? null : findProblem(name);
  const isOpen = choices !== null && shownView === "evaluation" && problem !== undefined;
  if (isOpen && (problem !== null || choices.environments !== null)) setProblem(problem);
  if (isOpen) route();
}

/** Put submitted files into the form, and for an own evaluator what else was sent. */
function editSubmission(status, files) {
  showFormOf(status);
  if ((form.problem?.name ?? null) !== status.problem) {
    // Or it would take the place of what is written for another problem.
    byId("rerun-error").textContent = say("The token does not permit this form, or it is gone.");
    return;
  }
  if (form.problem === null) form.prefill(new URLSearchParams(describeEvaluator(status)));
  form.edit(files);
  byId("form-section").scrollIntoView();
}

function describeEvaluator(status) {
  const { repository, commit_oid: commit, directory, evaluator_cmd: command, environment } = status;
  const given = { repository, commit, directory, command, environment: environment?.name };
  return Object.entries(given).filter(([, value]) => value);
}

/** Follow an evaluation, and let it be seen. */
function show(id, credential, options) {
  evaluation.open(id, credential, options);
  const place = byId("evaluation");
  place.focus({ preventScroll: true });
  // Where it stands below the form it would not be seen.
  if (place.getBoundingClientRect().top > innerHeight / 2) place.scrollIntoView();
}

/** Follow the evaluation of a link, which takes the place of a token. */
function showShared() {
  const { id, link } = readSharedFragment(location.hash);
  show(id, link, { isShared: true });
}

/** Show where a token is entered, and what is wrong with the one that there is. */
function askForToken(wrong = token ? say("The server does not accept this token.") : "") {
  byId("token-section").hidden = false;
  byId("token-error").textContent = wrong;
  byId("token-remember").checked = memory.get("token") !== null;
  byId("token").focus();
}

/** Let the form be sent while its problem takes submissions; else say when that is. */
function showOpening() {
  clearTimeout(opening);
  const now = Date.now() + aheadBy;
  const problem = findProblem(form.problem?.name) ?? {};
  const isSupervisor = Object.keys(choices?.me.supervises ?? {}).length > 0;
  const next = isSupervisor ? null : nextOpening(problem, now); // the server lets supervisors
  const time = next === null ? "" : timeWords(problem, now);
  const hint = byId("opening");
  // Until now the statement was refused, too.
  if (time === "" && hint.textContent !== "" && problem.name) statement.open(problem, token);
  hint.textContent = time && say("The problem {time}.", { time });
  byId("nothing").querySelector("p").textContent =
    next === null ? say("Press Evaluate. The result appears here.") : hint.textContent;
  for (const name of ["submit", "own-input-run"]) {
    setBusy(byId(name), next !== null || isSending);
  }
  const left = (next ?? Date.parse(problem.closes)) - now;
  if (left > 0 && left < Infinity) opening = setTimeout(showOpening, Math.min(left, LOOK_AGAIN));
}

/** Send the form, maybe with an input to run on, and show the evaluation that it begins. */
async function submit({ ownInput } = {}) {
  const button = byId("submit");
  const progress = byId("form-progress");
  if (isBusy(button) || !form.check()) return;
  isSending = true;
  showOpening();
  const notice = (pause) => {
    progress.textContent = pause
      ? say("Retrying in {time}: {why}", pauseWords(pause))
      : say("Sending …");
  };
  notice(null);
  try {
    const { problem } = form;
    const data = await form.data();
    if (ownInput !== undefined) {
      data.append(`submission[${OWN_INPUT}]`, new File([ownInput], "input.txt"));
    }
    memory.set("form", form.values);
    const client = new Client({ token, notice });
    const id = await (problem === null
      ? client.evaluate(data)
      : client.evaluateProblem(problem.name, data));
    const entry = { id, file: nameFiles(data) };
    memory.set("history", addEntry(memory.get("history"), entry));
    location.hash = `#evaluation/${id}`;
    announce(say("The evaluation has started."));
  } catch (error) {
    if (error.status === 401) return askForToken();
    form.showError(said(error), error.field ?? error.problem?.field);
  } finally {
    progress.textContent = "";
    isSending = false;
    showOpening();
  }
}

/** Keep a rerun in the history, with the file of the evaluation that was run again. */
function rememberRerun(id, former) {
  const entries = readEntries(memory.get("history"));
  const file = entries.find((entry) => entry.id === former)?.file ?? "";
  memory.set("history", addEntry(entries, { id, file }));
}

/** Return what a client may choose from; `environments` is null for problems alone. */
async function findChoices(client, tries) {
  const [me, problems, environments] = await Promise.all([
    client.whoami({ tries }),
    collect(client.problems({ tries })),
    client.environments({ tries }).catch((error) => {
      if (error.status === 403) return null;
      throw error;
    }),
  ]);
  aheadBy = (client.serverTime ?? Date.now()) - Date.now();
  if (environments === null && problems.length === 0) {
    const words = say("The token permits no problem of this server.");
    throw Object.assign(new Error(words), { status: 403 });
  }
  return { me, problems, environments };
}

async function collect(things) {
  const found = [];
  for await (const thing of things) found.push(thing);
  return found;
}

/** Offer what a token permits wherever it can be chosen, and show what the fragment names. */
function offer(permitted) {
  choices = permitted;
  form.offer(choices.environments);
  listing.offer(choices);
  classView.offer(choices);
  standings.offer(choices);
  problems.offer(choices.problems);
  statement.close(); // another token may not permit it
  route();
}

/** Show what is remembered, and then what the server offers. */
async function begin() {
  form.restore(memory.get("form") ?? {});
  route();
  hasBegun = shownView !== "shared";
  if (!hasBegun) return;
  const given = token;
  try {
    const permitted = await findChoices(new Client({ token }));
    if (given === token) offer(permitted); // or another one was entered meanwhile
  } catch (error) {
    if (given !== token) return;
    if (error.status === 401) askForToken();
    else if (error.status === 403) askForToken(said(error));
    else {
      offer({ me: { supervises: {} }, problems: [], environments: [] });
      form.showError(said(error));
    }
  }
}

/** Return the choices of a token, or `wrong`, what is wrong with it. */
async function tryToken(given) {
  let client;
  try {
    client = new Client({ token: given });
  } catch {
    return { wrong: say("A token cannot contain such characters.") };
  }
  try {
    return { permitted: await findChoices(client, 1) };
  } catch (error) {
    const isUnknown = error.status === 401;
    return { wrong: isUnknown ? say("The server does not accept this token.") : said(error) };
  }
}

/** Use another token, unless something is wrong with it, and put the focus where it is of use. */
async function takeToken(given) {
  const button = byId("token-submit");
  if (isBusy(button)) return;
  byId("token-error").textContent = given ? "" : say("Enter the token.");
  if (!given) return byId("token").focus();
  setBusy(button, true);
  const { permitted, wrong = "" } = await tryToken(given);
  byId("token-error").textContent = wrong;
  setBusy(button, false);
  if (wrong) return byId("token").focus();
  token = given;
  memory.set("token", byId("token-remember").checked ? token : null);
  byId("token").value = "";
  byId("token-section").hidden = true;
  form.clearError();
  evaluation.close(); // to be opened again
  offer(permitted);
  if (evaluation.id !== null) return;
  const isForm = !byId("evaluate-view").hidden;
  byId(isForm ? "submit" : "main").focus();
}

/** Forget the token and all else that this browser has kept, and begin anew. */
function forget() {
  memory.clear();
  removeEventListener("pagehide", saveDraft);
  history.replaceState(null, "", "#");
  location.reload();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  submit();
});

byId("own-input-run").addEventListener("click", () => {
  submit({ ownInput: byId("own-input-text").value });
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

setOptions(byId("language"), languages.map((each) => [each, nameLanguage(each)]), language);
byId("language").addEventListener("change", ({ target }) => {
  memory.set("language", target.value);
  memory.set("form", form.values);
  history.replaceState({ token }, ""); // for the page that is loaded next, and for no other
  location.reload();
});

byId("forget").addEventListener("click", forget);
addEventListener("hashchange", () => (hasBegun ? route() : begin()));
addEventListener("pagehide", saveDraft);
begin();
