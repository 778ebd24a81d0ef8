/** Types of `client.js`, whose comments describe each method. */

/** What the server says about a refused request (RFC 9457). */
export interface ProblemDocument {
  status?: number;
  detail?: string;
  message?: string;
  /** The invalid field of the form. */
  field?: string;
  /** The oldest usable cursor, if the events after the requested one are discarded. */
  oldest?: string;
  [member: string]: unknown;
}

/** Printed text, data of the evaluator, or an event of a later version. */
export type EvaluationEvent =
  | { type: "text"; payload: string; time?: string }
  | { type: "data"; payload: any; time?: string };

/** Consecutive events. `end` is null after the last one. */
export interface Page {
  begin: string | null;
  end: string | null;
  data: EvaluationEvent[];
}

/** A status, a summary in a list, a problem or an environment: members as in the API. */
export interface Document {
  [member: string]: any;
}

/** A submitted file: with `text` or `base64`, or without both if there is too much. */
export interface SubmittedFile {
  field: string;
  filename: string;
  size: number;
  text?: string;
  base64?: string;
}

/** The pause before a retry. */
export interface Notice {
  why: string;
  seconds: number;
  attempt: number;
}

export interface ClientOptions {
  /** The daemon's URL, ending in a slash; required outside of its own pages. */
  server?: string | URL;
  token?: string;
  /** A link, in place of a token; it reads one evaluation. */
  link?: string;
  /** Called before each retry, and with null when the server answers again. */
  notice?: (notice: Notice | null) => void;
  /** Used instead of `JSON.parse`. */
  parse?: (text: string) => any;
}

export interface RequestOptions {
  signal?: AbortSignal;
  /** The attempts of a request; 8 by default. */
  tries?: number;
}

export interface SubmitOptions extends RequestOptions {
  /** The Idempotency-Key; random by default. */
  key?: string;
}

export interface ListOptions extends RequestOptions {
  /** Called at the end with the names of daemons that have not answered. */
  away?: (names: string[]) => void;
}

export interface EvaluationsOptions extends ListOptions {
  state?: string;
  caller?: string;
  problem?: string;
  since?: Date;
  until?: Date;
  metadata?: Record<string, string>;
}

export interface PagesOptions {
  after?: string;
  /** Seconds for which the server may hold a request. */
  wait?: number;
  /** Bytes of JSON in a page. */
  limit?: number;
  signal?: AbortSignal;
}

export interface StreamOptions {
  after?: string;
  signal?: AbortSignal;
}

/** An error response. */
export class Refused extends Error {
  constructor(status: number, problem: ProblemDocument, retryAfter: number);
  readonly status: number;
  readonly problem: ProblemDocument;
  /** Seconds, 0 if the server does not say. */
  readonly retryAfter: number;
}

/** One daemon, for one caller. */
export class Client {
  constructor(options?: ClientOptions);
  evaluate(form: FormData, options?: SubmitOptions): Promise<string>;
  evaluateProblem(name: string, form: FormData, options?: SubmitOptions): Promise<string>;
  rerun(
    id: string,
    form?: FormData,
    options?: SubmitOptions & { evaluator?: "current" },
  ): Promise<string>;
  status(id: string, options?: RequestOptions): Promise<Document>;
  submission(id: string, options?: RequestOptions): Promise<SubmittedFile[]>;
  makeLink(
    id: string,
    options?: RequestOptions & { lifetime?: number },
  ): Promise<{ link: string; expires: string }>;
  revokeLinks(id: string, options?: RequestOptions): Promise<void>;
  cancel(id: string, options?: RequestOptions): Promise<void>;
  evaluations(options?: EvaluationsOptions): AsyncGenerator<Document, void, void>;
  standings(options?: RequestOptions): AsyncGenerator<Document, void, void>;
  whoami(options?: RequestOptions): Promise<Document>;
  problem(name: string, options?: RequestOptions): Promise<Document>;
  problems(options?: ListOptions): AsyncGenerator<Document, void, void>;
  environments(options?: RequestOptions): Promise<Document[]>;
  events(id: string, options?: PagesOptions): AsyncGenerator<EvaluationEvent, void, void>;
  pages(id: string, options?: PagesOptions): AsyncGenerator<Page, void, void>;
  stream(id: string, options?: StreamOptions): AsyncGenerator<Page, void, void>;
}

/** Whether a retry of the same request can succeed, after `error.retryAfter` seconds. */
export function isPassing(error: unknown): boolean;

/** Return 128 random bits, as a `key`. */
export function randomKey(): string;
