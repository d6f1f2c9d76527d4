/**
 * What follows a suite's name on the command line. Each suite says what it takes, and anything else is refused before it measures: a figure
 * of another run than the one that was asked for is worse than none. Options have both forms, `--name VALUE` and `--name=VALUE`.
 */
import { type ParseArgsConfig, parseArgs } from 'node:util';
import { KvError } from '@kvtier/errors';

/** `count`: a whole number above 0; `index`: of 0 or more; a list: some of these, with commas between. */
type Kind = 'flag' | 'text' | 'count' | 'index' | readonly string[];
type ValueOf<K extends Kind> = K extends 'flag'
  ? boolean
  : K extends 'text'
    ? string | undefined
    : K extends readonly (infer Each)[]
      ? readonly Each[] | undefined
      : number | undefined;

export interface Takes<Options extends Readonly<Record<string, Kind>>, Word extends string> {
  readonly options?: Options;
  /** What may be named without dashes, as often as one likes. */
  readonly words?: readonly Word[];
  /** Any other word, too: what it is called. */
  readonly anyWord?: string;
  /** Name of a whole number above 0 that may stand alone. */
  readonly number?: string;
}

export interface Given<Options extends Readonly<Record<string, Kind>>, Word extends string> {
  readonly options: { readonly [Name in keyof Options]: ValueOf<Options[Name]> };
  readonly words: readonly Word[];
  readonly number: number | undefined;
}

/** @throws KvError CONFIG for what the suite does not take; it names what there is */
export function argumentsOf<
  const Options extends Readonly<Record<string, Kind>> = Readonly<Record<never, Kind>>,
  const Word extends string = never,
>(suite: string, args: readonly string[], takes: Takes<Options, Word>): Given<Options, Word> {
  const { words: known = [], anyWord, number: name } = takes;
  const kinds: Readonly<Record<string, Kind>> = takes.options ?? {};
  const refuse = (what: string): never => {
    const all = [...known, anyWord, name, ...Object.entries(kinds).map(saidOf)].filter((each) => each !== undefined);
    throw new KvError(
      'CONFIG',
      `bench ${suite}: ${what}; ${all.length > 0 ? `there are: ${all.join(' ')}` : 'it takes nothing'}`,
    );
  };
  const whole = (what: string, text: string, least: number): number => {
    const value = Number(text);
    return Number.isSafeInteger(value) && /^\d+$/.test(text) && value >= least
      ? value
      : refuse(`${what}: "${text}" is not a whole number of ${least} or more`);
  };
  const readOption = (option: string, given: string | boolean | undefined): unknown => {
    const kind = kinds[option]!;
    if (kind === 'flag') return given ?? false;
    if (typeof given !== 'string' || kind === 'text') return given;
    if (kind === 'count' || kind === 'index') return whole(`--${option}`, given, kind === 'count' ? 1 : 0);
    const each = given.split(',');
    const unknown = each.find((one) => !kind.includes(one));
    return unknown === undefined ? each : refuse(`--${option}: "${unknown}" is none of its parts`);
  };

  const { values, positionals } = parsed(args, kinds, refuse);
  const words: Word[] = [];
  let number: number | undefined;
  for (const each of positionals) {
    if (anyWord !== undefined || (known as readonly string[]).includes(each)) words.push(each as Word);
    else if (name === undefined || number !== undefined || !/^\d+$/.test(each)) refuse(`"${each}" is unknown`);
    else number = whole(name, each, 1);
  }
  const options = Object.fromEntries(Object.keys(kinds).map((option) => [option, readOption(option, values[option])]));
  return { options: options as Given<Options, Word>['options'], words, number };
}

interface Parsed {
  readonly values: Readonly<Record<string, string | boolean | undefined>>;
  readonly positionals: readonly string[];
}

function parsed(
  args: readonly string[],
  kinds: Readonly<Record<string, Kind>>,
  refuse: (what: string) => never,
): Parsed {
  const options: ParseArgsConfig['options'] = Object.fromEntries(
    Object.entries(kinds).map(([option, kind]) => [option, { type: kind === 'flag' ? 'boolean' : 'string' }]),
  );
  try {
    return parseArgs({ args: [...args], options, allowPositionals: true }) as Parsed;
  } catch (error) {
    return refuse((error as Error).message.split(/\n|\. /)[0]!);
  }
}

function saidOf([option, kind]: readonly [string, Kind]): string {
  if (kind === 'flag') return `--${option}`;
  if (kind === 'text') return `--${option} TEXT`;
  return `--${option} ${typeof kind === 'string' ? 'N' : kind.join(',')}`;
}
