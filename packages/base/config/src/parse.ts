/**
 * A value against a schema, and what is wrong with it: one line that says where, and how to mend it. Nothing of what was written is
 * told, but for names of keys: it may be a password.
 */
import { KvError, nearest } from '@kvtier/errors';
import type * as z from 'zod';
import { keyPaths, keysAt } from './schema-keys.ts';

type Issue = z.core.$ZodIssue;

export interface ConfigProblem {
  readonly path: readonly PropertyKey[];
  /** "is required", 'unknown key "server"; did you mean "servers"?' */
  readonly what: string;
}

/** One line for one problem, with its path; KvError CONFIG. `source`: where whoever reads the line has written the value. */
export function parseConfig<T>(schema: z.ZodType<T>, value: unknown, source: string): T {
  const result = schema.safeParse(value);
  if (result.success) return result.data;
  const { path, what } = problemOf(schema, value, result.error.issues);
  const where = path.length > 0 ? path.join('.') : 'top level';
  throw new KvError(
    'CONFIG',
    `${source}: ${where}: ${what}${what.endsWith('?') ? '' : '; correct it and start again'}`,
    { isFinal: true },
  );
}

/** undefined: there is none. */
export function configProblem(schema: z.ZodType, value: unknown): ConfigProblem | undefined {
  const { error } = schema.safeParse(value);
  return error && problemOf(schema, value, error.issues);
}

/** A key that nobody knows goes first: what is missing is often what was meant by it. */
function problemOf(schema: z.ZodType, value: unknown, found: readonly Issue[]): ConfigProblem {
  const issues = found.flatMap(ofUnion);
  const issue = issues.find(({ code }) => code === 'unrecognized_keys') ?? issues[0]!;
  return { path: issue.path, what: whatIsWrong(issue, schema, value) };
}

/** Of several kinds that a value could be, those that it comes closest to: whose type it is. */
function ofUnion(issue: Issue): Issue[] {
  if (issue.code !== 'invalid_union' || issue.errors.length === 0) return [issue];
  const isOfType = issue.errors.find(
    (branch) => !branch.some((each) => each.code === 'invalid_type' && !each.path.length),
  );
  const meant = isOfType ?? issue.errors.at(-1)!;
  return meant.flatMap((each) => ofUnion({ ...each, path: [...issue.path, ...each.path] }));
}

function whatIsWrong(issue: Issue, schema: z.ZodType, value: unknown): string {
  if (issue.code === 'unrecognized_keys') return unknownKey(issue.keys[0]!, issue.path, schema);
  if (issue.code === 'invalid_key') return issue.issues[0]!.message;
  const given = issue.path.reduce<unknown>((at, key) => (at as Record<PropertyKey, unknown> | undefined)?.[key], value);
  if (given === undefined && issue.code !== 'custom') return 'is required';
  const names = namesOf(issue);
  if (names.length > 0) {
    const near = typeof given === 'string' ? nearest(given, names) : undefined;
    return near === undefined ? `write one of ${names.join(', ')}` : `did you mean "${near}"?`;
  }
  if (
    issue.code === 'invalid_type' &&
    issue.expected === 'number' &&
    typeof given === 'string' &&
    isOfBytes(issue.path)
  )
    return 'write a number of bytes, without a unit';
  if (issue.code === 'too_small' && issue.origin !== 'string' && issue.origin !== 'array')
    return `write ${issue.inclusive === false ? 'more than ' : ''}${issue.minimum}${issue.inclusive === false ? '' : ' or more'}`;
  if (issue.code === 'too_big' && issue.origin !== 'string' && issue.origin !== 'array')
    return `write ${issue.inclusive === false ? 'less than ' : ''}${issue.maximum}${issue.inclusive === false ? '' : ' or less'}`;
  return issue.message.replace(/^Invalid input: /, '');
}

/** By its name: `bytes`, `maxBytes`, `bytesPerS`. */
const isOfBytes = (path: readonly PropertyKey[]): boolean => /^bytes|Bytes$/.test(String(path.at(-1)));

/** What may stand there, if that is one of some names. */
function namesOf(issue: Issue): string[] {
  if (issue.code === 'invalid_value') return issue.values.map(String);
  const options = issue.code === 'invalid_union' && 'options' in issue ? issue.options : [];
  return Array.isArray(options) ? options.map(String) : [];
}

const listedKeys = 12;

function unknownKey(key: string, path: readonly PropertyKey[], schema: z.ZodType): string {
  const known = keysAt(schema, path);
  const near = nearest(key, known) ?? keyPaths(schema).find((each) => each.endsWith(`.${key}`) && !each.includes('*'));
  const here = known.length <= listedKeys ? `; its keys are ${known.join(', ')}` : '';
  return `unknown key "${key}"${near === undefined ? here : `; did you mean "${near}"?`}`;
}
