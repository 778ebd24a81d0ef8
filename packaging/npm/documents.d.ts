/** The API's documents. `scripts/document_types` writes them from openapi.json. */

/** A problem of the operator with its statement. */
export interface ProblemDocument {
  name: string;
  title: string;
  description: string;
  fields: Array<string>;
  extensions: Array<string>;
  own_input: boolean;
  environment: string;
  limits: Limits;
  opens: string | null;
  closes: string | null;
  late: boolean;
  statement: string;
  pictures: Record<string, string>;
}

/** A problem of the operator. (`Problem` is the document of an error.) */
export interface JudgedProblem {
  name: string;
  title: string;
  description: string;
  fields: Array<string>;
  extensions: Array<string>;
  own_input: boolean;
  environment: string;
  limits: Limits;
  opens: string | null;
  closes: string | null;
  late: boolean;
}

/** A submitted file, with `text` or `base64`, or neither if its content is over what is left
    of 256 KiB for all files. */
export interface SubmittedFile {
  field: string;
  filename: string;
  size: number;
  text?: string;
  base64?: string;
}

export interface Link {
  link: string;
  expires: string;
}

export interface Page {
  begin: string | null;
  end: string | null;
  data: Array<TextEvent | DataEvent>;
}

/** Output of the evaluator: exactly one line feed, or a whole or partial line without one. */
export interface TextEvent {
  type: "text";
  payload: string;
  time?: string;
}

/** Data for programs; the evaluator and the client agree on its meaning. The daemon itself
    makes two shapes, told apart by their member `type`: `File` and `EvaluationError`. */
export interface DataEvent {
  type: "data";
  payload: any;
  time?: string;
}

export type State = "queued" | "fetching" | "running" | "finished" | "failed" | "cancelled";

export interface Status {
  evaluation_id: string;
  log_name: string;
  state: State;
  queue_place: number | null;
  caller: string | null;
  problem: string | null;
  counts: boolean;
  repository: string;
  commit_oid: string | null;
  tree_oid: string | null;
  directory: string;
  evaluator_cmd: string;
  seed: number;
  build: "running" | "waiting" | null;
  environment: ChosenEnvironment | null;
  limits: Limits;
  metadata: Record<string, string>;
  submitted: string;
  created: string;
  fetching: string | null;
  running: string | null;
  ended: string | null;
  exit: Exit | null;
  usage: Usage | null;
  error: Failure | null;
  results: Results | null;
  runner: Runner | null;
  callback: Callback | null;
  stderr: string;
  events: EventCounts;
  buffered_bytes: number;
  archived?: boolean;
}

export interface EventCounts {
  buffered: number;
  discarded: number;
}

export interface Runner {
  kind: "slurm";
  job: string | null;
  node: string | null;
  queue_reason: string | null;
  retries: number;
}

/** The limits of the evaluation: the request's, or the operator's defaults. Until it runs, a
    change of the configuration may change them. */
export interface Limits {
  wall_clock: number;
  cpu: number;
  memory: number;
  processes: number;
  open_files: number;
  file_size: number;
  disk: number;
  disk_files: number;
  output: number;
  stderr: number;
}

/** How the evaluator's own process ended; one member is `null`. In the sandbox, status 128 +
    N is reported as signal N. */
export interface Exit {
  status: number | null;
  signal: number | null;
}

/** Resource use of all processes of the evaluation together; `null` if unknown. Without
    cgroups `cpu_seconds` misses processes that the evaluator did not wait for. */
export interface Usage {
  cpu_seconds: number | null;
  peak_memory_bytes: number | null;
  wall_seconds: number | null;
}

/** Members of the final error event. */
export interface Failure {
  reason: string;
  message: string;
}

/** Summary of the results that the evaluator has sent as data. */
export interface Results {
  goals: Record<string, boolean>;
  goals_omitted: number;
  cases: Record<string, number>;
  progress: Progress | null;
  score: Score | null;
}

export interface Progress {
  done: number;
  total: number;
}

export interface Score {
  score: number;
  maximum: number | null;
}

/** State of the callback. */
export interface Callback {
  url: string;
  state: "waiting" | "pending" | "delivered" | "refused" | "given_up";
  attempts: number;
  last_error: string | null;
}

export interface Summary {
  evaluation_id: string;
  state: State;
  caller: string | null;
  problem: string | null;
  counts: boolean;
  directory: string;
  evaluator_cmd: string;
  metadata: Record<string, string>;
  submitted: string;
  created: string;
  ended: string | null;
  error: Failure | null;
  results: Results | null;
}

/** What a caller has reached in a problem. A rerun takes the place of the evaluation that it
    repeats. */
export interface Standing {
  caller: string | null;
  problem: string;
  submissions: number;
  evaluated: number;
  last_submitted: string;
  best: Summary;
}

/** A caller, and what its token permits. */
export interface TokenPermissions {
  caller: string | null;
  read_only: boolean;
  shared: boolean;
  problems: Array<string> | null;
  group: string | null;
  supervises: Record<string, Array<string>>;
}

export interface Environment {
  name: string;
  description: string;
  digest: string | null;
}

/** The environment of an evaluation. */
export interface ChosenEnvironment {
  name: string;
  digest: string | null;
}

/** RFC 9457. `detail` and `message` are the same sentence for people; old TuringArena clients
    read `message`. */
export interface Problem {
  type: "about:blank";
  title: string;
  status: number;
  detail: string;
  message: string;
  field?: string;
  size?: number;
  limit?: number;
  oldest?: string;
  offered?: string;
  reasons?: Array<string>;
}
