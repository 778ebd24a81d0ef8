/** Command lines that send the same form as the page, for a POSIX shell. */

const PLAIN = /^[A-Za-z0-9_@%+=:,./-]+$/;
const NAMES = {
  "repository[url]": "--repository",
  "repository[branch]": "--branch",
  "repository[depth]": "--depth",
  commit_oid: "--commit",
  directory: "--directory",
  environment: "--environment",
  evaluator_cmd: "--evaluator",
  seed: "--seed",
  limits: "--limit",
  metadata: "--label",
};

/** Return a word as a shell takes it for one. */
export function quoted(word) {
  return PLAIN.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`;
}

/**
 * Return the command of curl. `fields` are `{ name, value }`, or `{ name, file }` with the
 * file's name, in their order. `problem` is the name of a problem, or empty. A token is taken from
 * the environment: none is ever shown.
 */
export function curlCommand(server, fields, problem, withToken) {
  const path = problem ? `problems/${problem}/evaluate` : "evaluate";
  const words = [`curl ${quoted(new URL(path, server).href)}`];
  if (withToken) words.push('--header "Authorization: Bearer $TAWEBEVAL_TOKEN"');
  for (const { name, value, file } of fields) {
    // Values by another option, for --form reads more into some of them.
    if (file === undefined) words.push(`--form-string ${quoted(`${name}=${value}`)}`);
    else words.push(`--form ${quoted(`${name}=@${curlPath(file)}`)}`);
  }
  return words.join(" \\\n  ");
}

/** Return the command of tawebeval, with the same arguments. */
export function tawebevalCommand(server, fields, problem, withToken) {
  const words = [`tawebeval evaluate --server ${quoted(new URL(server).href)}`];
  if (withToken) words[0] = `TAWEBEVAL_TOKEN="$TAWEBEVAL_TOKEN" ${words[0]}`;
  if (problem) words.push(`--problem ${quoted(problem)}`);
  const submission = [];
  for (const { name, value, file } of fields) {
    const field = name.match(/^submission\[(.*)\]$/)?.[1];
    const [, kind, part] = name.match(/^(limits|metadata)\[(.*)\]$/) ?? [];
    if (kind !== undefined) words.push(`${NAMES[kind]} ${quoted(`${part}=${value}`)}`);
    else if (field === undefined) words.push(`${NAMES[name]} ${quoted(value)}`);
    else submission.push(quoted(file === undefined ? `${field}=${value}` : `${field}:${file}`));
  }
  return [...words, ...submission].join(" \\\n  ");
}

/** Return a path as curl wants it: in quotes where something in it means more. */
function curlPath(path) {
  return /[;,"\\]/.test(path) ? `"${path.replace(/["\\]/g, "\\$&")}"` : path;
}
