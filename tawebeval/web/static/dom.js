/** Elements, made and found. Text is always text: nothing here reads markup. */

/** Return the element of the page with this identifier. */
export function byId(id) {
  return document.getElementById(id);
}

/**
 * Return a new element. A property that elements do not have becomes an attribute; children
 * are elements or text.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

/** Let a select offer options, pairs of value and text; keep its value, or begin with `first`. */
export function setOptions(select, options, first = "") {
  const wanted = select.length > 0 ? select.value : first;
  select.replaceChildren(...options.map(([value, text]) => element("option", { value }, text)));
  select.value = wanted;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
}

/**
 * Let a button rest, or no longer, while it is at work. It keeps the focus, which `disabled`
 * would take from it; who presses it has to ask `isBusy`.
 */
export function setBusy(button, busy) {
  button.ariaDisabled = busy ? "true" : null;
}

/** Return whether a button rests. */
export function isBusy(button) {
  return button.ariaDisabled === "true";
}

/** Tell those who do not see the page; what is said next replaces it, so say little. */
export function announce(text) {
  byId("announcement").textContent = text;
}

/** Put a text on the clipboard, and say so on the button for a moment. */
export async function copy(button, text) {
  const label = button.dataset.label ?? button.textContent;
  button.dataset.label = label;
  let said = "Copied";
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    said = "Not allowed"; // browsers allow it only over TLS, or to this machine's own pages
  }
  button.textContent = said;
  announce(said);
  setTimeout(() => {
    button.textContent = label;
  }, 1500);
}

/** Return what is to be said of an error of a request. */
export function said(error) {
  return error.status || error.field ? error.message : "The server does not answer.";
}

/** Return a length of time, in seconds, for people. */
export function duration(seconds) {
  if (seconds < 10) return `${Number(seconds).toFixed(1)} s`; // it may be an ExactNumber
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  const [minutes, hours] = [Math.floor(seconds / 60), Math.floor(seconds / 3600)];
  if (minutes < 60) return withRest(minutes, "min", Math.floor(seconds % 60), "s");
  return withRest(hours, "h", minutes % 60, "min");
}

function withRest(count, unit, rest, smaller) {
  return rest === 0 ? `${count} ${unit}` : `${count} ${unit} ${rest} ${smaller}`;
}

/** Return a number of bytes for people. */
export function bytes(count) {
  if (count < 1024) return `${count} B`;
  if (count < 1024 ** 2) return `${(count / 1024).toFixed(1)} KiB`;
  return `${(count / 1024 ** 2).toFixed(1)} MiB`;
}

/** Return the number of things: `counted(2, "line")` is "2 lines". */
export function counted(count, thing) {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;
}
