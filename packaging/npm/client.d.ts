/** Types of `client.js`, whose comments describe each method. */

import type {
  DataEvent,
  Environment,
  JudgedProblem,
  Link,
  Page,
  Problem,
  ProblemDocument,
  Standing,
  Status,
  SubmittedFile,
  Summary,
  TextEvent,
  TokenPermissions,
} from "./documents.js";

export type * from "./documents.js";

/** Printed text, or data of the evaluator. Later versions of the server may send other events. */
export type EvaluationEvent = TextEvent | DataEvent;

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
  constructor(status: number, problem: Partial<Problem>, retryAfter: number);
  readonly status: number;
  /** What the server says (RFC 9457); empty if a proxy answers. */
  readonly problem: Partial<Problem>;
  /** Seconds, 0 if the server does not say. */
  readonly retryAfter: number;
}

/** One daemon, for one caller. */
export class Client {
  constructor(options?: ClientOptions);
  /** Milliseconds, of the newest answer, by the clock of the server; null before the first. */
  readonly serverTime: number | null;
  evaluate(form: FormData, options?: SubmitOptions): Promise<string>;
  evaluateProblem(name: string, form: FormData, options?: SubmitOptions): Promise<string>;
  rerun(
    id: string,
    form?: FormData,
    options?: SubmitOptions & { evaluator?: "current" },
  ): Promise<string>;
  status(id: string, options?: RequestOptions): Promise<Status>;
  submission(id: string, options?: RequestOptions): Promise<SubmittedFile[]>;
  makeLink(
    id: string,
    options?: RequestOptions & { lifetime?: number },
  ): Promise<Link>;
  revokeLinks(id: string, options?: RequestOptions): Promise<void>;
  cancel(id: string, options?: RequestOptions): Promise<void>;
  evaluations(options?: EvaluationsOptions): AsyncGenerator<Summary, void, void>;
  standings(options?: RequestOptions): AsyncGenerator<Standing, void, void>;
  whoami(options?: RequestOptions): Promise<TokenPermissions>;
  problem(
    name: string,
    options?: RequestOptions & { language?: string | null },
  ): Promise<ProblemDocument>;
  problems(options?: ListOptions): AsyncGenerator<JudgedProblem, void, void>;
  environments(options?: RequestOptions): Promise<Environment[]>;
  events(id: string, options?: PagesOptions): AsyncGenerator<EvaluationEvent, void, void>;
  pages(id: string, options?: PagesOptions): AsyncGenerator<Page, void, void>;
  stream(id: string, options?: StreamOptions): AsyncGenerator<Page, void, void>;
}

/** Whether a retry of the same request can succeed, after `error.retryAfter` seconds. */
export function isPassing(error: unknown): boolean;

/** Return 128 random bits, as a `key`. */
export function randomKey(): string;
