/**
 * All objects of one kind that a selector names, kept up by list and watch. Invariants: an object is never known older than it was
 * known before, except after a new list; the objects stay as they are while the server is away; a watch ends at its time and is begun
 * again from the last version seen, so that nothing is missed, and what is too old for the server is listed anew.
 */
import { KvError } from '@kvtier/errors';
import { ApiRefusal, type ApiServerLink } from './api-server-link.ts';
import { parseBookmark, parseEvent, parseFailure, parseNamed, parsePage } from './objects.ts';

/** So few that reading a page is no long turn. */
const pageObjects = 100;
/** Of one kind; a selector that names more is refused. */
const maxObjects = 8_192;
/** Of one list: twice what the objects fill, for pages that the selector leaves half empty. */
const maxPages = (2 * maxObjects) / pageObjects;
const firstBackoffMs = 100;
const maxBackoffMs = 5_000;
/** A watch that ends sooner, with nothing told, did not work. */
const shortWatchMs = 1_000;

export interface WatchedOptions<T> {
  readonly link: ApiServerLink;
  /** "/api/v1/namespaces/x/pods" */
  readonly path: string;
  readonly labelSelector: string;
  /** @throws KvError: it is none, and counts as not there */
  readonly parse: (value: unknown) => T;
  readonly timeLimitMs: number;
  readonly watchSeconds: number;
  readonly changed: () => void;
  readonly problem: (why: string | undefined) => void;
  /** An object that is none. */
  readonly ignored: (name: string, why: string) => void;
}

export class Watched<T> {
  readonly #options: WatchedOptions<T>;
  readonly #abort = new AbortController();
  readonly #running: Promise<void>;
  #objects = new Map<string, T>();
  #isListed = false;
  /** The last seen; undefined: list. */
  #version: string | undefined;
  /** One after the other, without a watch that worked between them. */
  #failures = 0;

  constructor(options: WatchedOptions<T>) {
    this.#options = options;
    this.#running = this.#run();
  }

  /** undefined: not listed yet. */
  get objects(): ReadonlyMap<string, T> | undefined {
    return this.#isListed ? this.#objects : undefined;
  }

  async close(): Promise<void> {
    this.#abort.abort();
    await this.#running;
  }

  async #run(): Promise<void> {
    const { signal } = this.#abort;
    while (!signal.aborted) {
      let pauseMs = 0;
      try {
        this.#version ??= await this.#list();
        if (!(await this.#watch(this.#version))) pauseMs = this.#backoffMs();
      } catch (error) {
        if (signal.aborted) return;
        const isGone = error instanceof ApiRefusal && error.isGone;
        if (isGone) this.#version = undefined;
        // The first time that is how it goes; a server that says nothing else has a problem.
        if (!isGone || this.#failures > 0) this.#options.problem(lineOf(error));
        pauseMs = isGone && this.#failures === 0 ? 0 : this.#backoffMs();
        if (error instanceof ApiRefusal) pauseMs = Math.max(pauseMs, error.retryAfterMs);
        this.#failures++;
      }
      if (pauseMs > 0) await pause(pauseMs, signal);
    }
  }

  #backoffMs(): number {
    return Math.min(maxBackoffMs, firstBackoffMs * 2 ** Math.min(this.#failures, 10)) * (0.75 + Math.random() / 2);
  }

  /** Its version. What is not in it is not there any more. */
  async #list(): Promise<string> {
    const { link, path, labelSelector } = this.#options;
    const objects = new Map<string, T>();
    let [version, next] = ['', ''];
    let pages = 0;
    do {
      if (++pages > maxPages) throw new KvError('PROTOCOL', `the list of ${labelSelector} does not end`);
      const query = { labelSelector, limit: String(pageObjects), ...(next === '' ? {} : { continue: next }) };
      const page = parsePage(await link.get(path, query, this.#abort.signal));
      for (const item of page.items) this.#put(objects, item);
      if (objects.size > maxObjects) {
        throw new KvError('CAPACITY', `${labelSelector} names more than ${maxObjects} objects; narrow it`);
      }
      [version, next] = [page.version, page.next];
    } while (next !== '');
    this.#objects = objects;
    this.#isListed = true;
    this.#options.changed();
    return version;
  }

  /** Whether it did something: told an event, or lasted. */
  async #watch(from: string): Promise<boolean> {
    const { link, path, labelSelector, watchSeconds, timeLimitMs, problem } = this.#options;
    const query = {
      ...{ watch: 'true', labelSelector, resourceVersion: from },
      ...{ allowWatchBookmarks: 'true', timeoutSeconds: String(watchSeconds) },
    };
    const beganMs = performance.now();
    let events = 0;
    const onOpen = (): void => problem(undefined);
    const limitMs = watchSeconds * 1_000 + timeLimitMs;
    await link.watch(path, query, { limitMs, signal: this.#abort.signal, onOpen }, (line) => {
      this.#take(line);
      events++;
      this.#failures = 0;
    });
    const worked = events > 0 || performance.now() - beganMs >= shortWatchMs;
    this.#failures = worked ? 0 : this.#failures + 1;
    return worked;
  }

  #take(line: unknown): void {
    const { type, object } = parseEvent(line);
    if (type === 'ERROR') {
      const { code, message } = parseFailure(object);
      throw new ApiRefusal(code ?? 500, message ?? 'a watch failed');
    }
    if (type === 'BOOKMARK') {
      this.#version = parseBookmark(object);
      return;
    }
    if (type === 'DELETED') this.#objects.delete(parseNamed(object).name);
    else if (type === 'ADDED' || type === 'MODIFIED') this.#put(this.#objects, object);
    else throw new KvError('PROTOCOL', `an event of type ${type.slice(0, 40)}`);
    this.#version = parseNamed(object).resourceVersion;
    this.#options.changed();
  }

  #put(objects: Map<string, T>, value: unknown): void {
    let name = 'an object without a name';
    try {
      ({ name } = parseNamed(value));
      const object = this.#options.parse(value);
      if (objects.size < maxObjects + 1 || objects.has(name)) objects.set(name, object);
    } catch (error) {
      objects.delete(name);
      this.#options.ignored(name, lineOf(error));
    }
  }
}

/** The first line, of whatever was thrown. */
function lineOf(error: unknown): string {
  const { message, code } = error as Error & { code?: string };
  return message === '' || message === undefined ? String(code ?? error) : message.split('\n')[0]!;
}

function pause(ms: number, signal: AbortSignal): Promise<void> {
  return new Promise((resolve) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener('abort', done, { once: true });
    function done(): void {
      clearTimeout(timer);
      signal.removeEventListener('abort', done);
      resolve();
    }
  });
}
