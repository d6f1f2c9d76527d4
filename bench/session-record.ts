/**
 * What a session on a GPU machine measured (`figures.jsonl` of packages/engine/cuda/gpu-session.sh), kept as a run of the suite `gpu-session`:
 * `npm run gpu:record -- FIGURES.JSONL...`. Day, build and machine are the session's own, which its first line says.
 */
import { readFileSync } from 'node:fs';
import { KvError } from '@kvtier/errors';
import { type Figure, isComparison } from './figures.ts';
import { type Run, readHistory, record } from './record.ts';

const suite = 'gpu-session';
const allStages = 'probe build checks speed system connector whole sanitize';

/** The first line of a session, below `session`. */
interface Head {
  readonly at: string;
  readonly commit: string;
  readonly machine: string;
  readonly stages: string;
}

/** Any line: a head, a figure, how a case ended, or what the probe found. */
interface Line extends Partial<Figure> {
  readonly session?: Partial<Head>;
  readonly case?: string;
  readonly error?: string;
  readonly leftOut?: string;
}

export interface Session {
  readonly run: Run;
  /** One line each: what it does not have, and why. */
  readonly lacks: readonly string[];
}

function parsed(line: string): Line | undefined {
  try {
    return JSON.parse(line) as Line;
  } catch {
    return undefined; // half a line of a case that was killed
  }
}

function isHead(head: Partial<Head>): head is Head {
  const { at, commit, machine, stages } = head;
  return (
    [commit, machine, stages].every((word) => typeof word === 'string' && word !== '') &&
    /^\d{4}-\d\d-\d\d$/.test(at ?? '')
  );
}

/** @throws KvError CONFIG for what is no session with figures; `name` is how it is called in the message */
export function sessionOf(text: string, name: string): Session {
  const heads: Partial<Head>[] = [];
  const figures: Figure[] = [];
  const lacks: string[] = [];
  for (const each of text.split('\n').filter((line) => line.trim() !== '')) {
    const line = parsed(each);
    if (line === undefined) lacks.push(`no figure: ${each}`);
    else if (line.session !== undefined) heads.push(line.session);
    else if (line.error !== undefined) lacks.push(`FAILED ${line.case}: ${line.error}`);
    else if (line.leftOut !== undefined) lacks.push(`left out ${line.case}: ${line.leftOut}`);
    else if (line.name !== undefined) {
      const figure = line as Figure;
      if (isComparison(figure)) figures.push(figure);
      else lacks.push(`no comparison: ${figure.name}`);
    }
  }
  const refuse = (why: string): never => {
    throw new KvError('CONFIG', `gpu:record: ${name} ${why}`);
  };
  const head = heads[0] ?? {};
  if (!isHead(head))
    return refuse('does not say of which build and machine it is; it was written by an older gpu-session.sh');
  if (heads.length > 1) return refuse('has two sessions; name their files one by one');
  if (figures.length === 0) return refuse('has no figures');
  const { at, commit, machine, stages } = head;
  const isAll = stages === allStages;
  const run: Run = {
    ...{ at, commit, machine, suite },
    ...(!isAll && { args: stages.split(' ') }),
    ...(isAll && lacks.length === 0 && { isWhole: true }),
    figures,
  };
  return { run, lacks };
}

/** Where runs are kept; another one for tests. */
interface History {
  readHistory(): readonly Run[];
  record(run: Run): void;
}

/**
 * Lines for a person: how many figures each file gave, and what it lacks. Where one cannot be recorded, none is.
 * @throws KvError CONFIG
 */
export function recordSessions(files: readonly string[], history: History = { readHistory, record }): string[] {
  if (files.length === 0) throw new KvError('CONFIG', 'gpu:record: name the figures.jsonl of a session');
  const known = new Set(history.readHistory().map((run) => JSON.stringify(run)));
  const sessions = files.map((file) => {
    const session = sessionOf(textOf(file), file);
    const written = JSON.stringify(session.run);
    if (known.has(written)) throw new KvError('CONFIG', `gpu:record: ${file} is recorded already`);
    known.add(written);
    return { file, ...session };
  });
  return sessions.flatMap(({ file, run, lacks }) => {
    history.record(run);
    return [`${file}: ${run.figures.length} figures`, ...lacks];
  });
}

function textOf(file: string): string {
  try {
    return readFileSync(file, 'utf8');
  } catch (error) {
    throw new KvError('CONFIG', `gpu:record: ${file} cannot be read (${(error as NodeJS.ErrnoException).code})`);
  }
}

/** `npm run gpu:record`: its exit code. */
export function main(args: readonly string[]): number {
  try {
    for (const line of recordSessions(args)) process.stdout.write(`${line}\n`);
    return 0;
  } catch (error) {
    if (!(error instanceof KvError)) throw error;
    process.stderr.write(`kvtier: ${error.message}\n`);
    return 1;
  }
}
