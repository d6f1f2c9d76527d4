/**
 * The life of a service process: start, say "ready" to the supervisor (Node IPC, when there is one), run until SIGTERM,
 * SIGINT, SIGHUP or until the supervisor is gone, close in order. A failure at start is one line on stderr and an exit code that says
 * whether another start can do better (docs/errors.md, "Exit codes").
 *
 * Invariant: once its end has begun the process is gone within `closeDeadlineMs`, whatever hangs. Node's own ways out (process.exit, an
 * uncaught exception, an empty event loop) all join libuv's threads, and with one that is stuck in a file system call none of
 * them ends. So nothing here relies on them: a process ends by _exit, and by SIGKILL from a thread of its own at its deadline.
 */

import { native } from '@kvtier/data-plane';
import { exitCodeOf, KvError } from '@kvtier/errors';
import { stderrSink } from './line-sink.ts';
import { type ServiceArguments, serviceArguments, serviceHelp } from './service-arguments.ts';
import { version } from './version.ts';

/** From the signal to SIGKILL; a supervisor that stops several services gives less. */
const closeDeadlineMs = 8_000;
/** What lines that nobody reads may hold up an end. */
const lastWordsMs = 500;

export interface RunningService {
  /** Told to the supervisor as {ready: ...}: addresses and the like. */
  readonly ready: Readonly<Record<string, unknown>>;
  /** It is ready then; a start that fails late rejects. Without it: at once. */
  readonly begun?: Promise<void>;
  close(): Promise<void>;
}

/** Ends the process now: no file system call, no listener and no reader of our lines can keep it. */
export function endProcess(code: number): void {
  void stderrSink()
    .flush(lastWordsMs)
    .then(() => native.exitNow(code));
}

/** In `graceMs`, for what is still to be said; whatever keeps the event loop then, SIGKILL follows. */
export function endProcessAfter(code: number, graceMs: number, name: string): void {
  const line = `${name}: still there ${graceMs + 2 * lastWordsMs} ms after it failed; killed\n`;
  native.killAfter(graceMs + 2 * lastWordsMs, line);
  setTimeout(() => endProcess(code), graceMs);
}

/** Something that a start looks at. @throws KvError what the start would end with */
export type Check = () => unknown;
export type Checks = (given: ServiceArguments, warn: (line: string) => void) => readonly Check[];

/**
 * `start` gets what the command line says; `argv` is without Node and the program. `checks` are for `--check`: they read the configuration
 * as `start` does, and bind, make and remove nothing. All of them are made, and each problem is one line.
 */
export function runService(
  name: string,
  start: (given: ServiceArguments) => Promise<RunningService>,
  checks: Checks,
  argv: readonly string[] = process.argv.slice(2),
): void {
  let running: RunningService | undefined;
  let closing = false;
  const say = (what: string): void => stderrSink().write(`${name}: ${what}\n`);
  const closeBy = (why: string): void =>
    native.killAfter(closeDeadlineMs, `${name}: not closed ${closeDeadlineMs / 1000} s after ${why}; killed\n`);

  const stop = async (why: string): Promise<void> => {
    if (closing) return;
    closing = true;
    closeBy(why);
    let code = 0;
    try {
      await running?.close();
    } catch (error) {
      say(`while closing: ${(error as Error).message}`);
      code = 1;
    }
    tell({ turns: turnsOf() }); // for whoever watches over a test
    endProcess(code);
  };
  const crash = (error: unknown, origin: string): void => {
    closeBy(origin);
    say(`${origin}, a defect: ${error instanceof Error ? (error.stack ?? error.message) : String(error)}`);
    endProcess(1);
  };
  process.on('uncaughtException', crash); // and what nobody caught of a promise
  for (const signal of ['SIGTERM', 'SIGINT', 'SIGHUP'] as const) process.on(signal, () => void stop(signal));
  if (process.connected) {
    // Nobody is left to restart or reap us. The thread is for a loop that stands still.
    native.endWithParent(
      closeDeadlineMs,
      `${name}: still there ${closeDeadlineMs / 1000} s after its supervisor; killed\n`,
    );
    process.on('disconnect', () => void stop('the end of its supervisor'));
    process.on('message', (message: unknown) => {
      if (isPing(message)) tell({ pong: message.ping });
    });
  }
  const answer = (text: string): undefined => {
    process.stdout.write(text);
    endProcess(0);
  };
  const begin = async (): Promise<RunningService | undefined> => {
    const given = serviceArguments(argv);
    if (given === 'help') return answer(serviceHelp(name));
    if (given === 'version') return answer(`${name} ${version}\n`);
    return given.isCheck ? await check(given) : await start(given);
  };
  const check = async (given: ServiceArguments): Promise<undefined> => {
    const problems: KvError[] = [];
    for (const look of checks(given, say)) {
      try {
        await look();
      } catch (error) {
        problems.push(KvError.from(error, 'SETUP'));
      }
    }
    if (problems.length === 0) return answer(`configuration is valid: ${given.configFile ?? 'KVTIER_CONFIG'}\n`);
    for (const { code, message } of problems) say(`${code}: ${message}`);
    endProcess(exitCodeOf(problems));
  };
  const fail = (error: unknown): void => {
    if (closing) return;
    const failure = KvError.from(error, 'SETUP');
    say(`${failure.code}: ${failure.message}`);
    endProcess(exitCodeOf([failure]));
  };
  begin().then((service) => {
    if (service === undefined) return;
    running = service; // from here on it is closed before the end
    const tellReady = (): void => {
      native.watchTurns(); // of the service; a start may take its time
      if (!closing) tell({ ready: service.ready });
    };
    if (service.begun === undefined) tellReady();
    else service.begun.then(tellReady, fail);
  }, fail);
}

/** A supervisor that has just died is learned of by 'disconnect', not by an error here. */
function tell(message: object): void {
  process.send?.(message, undefined, undefined, () => {});
}

/** Of the event loop since the service was ready: how many above 50 ms, and of the first of these [CPU time of its thread in ms, new pages]. */
function turnsOf(): { above50ms: number; first: [ms: number, pages: number][] } {
  const { longTurns, rows } = native.turnsSeen();
  const first = Array.from({ length: rows.length / 4 }, (_, row): [number, number] => [
    rows[row * 4 + 2]!,
    rows[row * 4 + 3]!,
  ]);
  return { above50ms: longTurns, first };
}

const isPing = (message: unknown): message is { ping: unknown } =>
  typeof message === 'object' && message !== null && 'ping' in message;
