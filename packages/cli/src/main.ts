/** The `kvtier` command. `main` returns the exit code; every failure of the world is one line on stderr. */
import { exitCodeOf, KvError, nearest } from '@kvtier/errors';
import { version } from '@kvtier/telemetry/version';
import { miswritten } from './miswritten.ts';
import { parseUp, upHelp } from './options.ts';

const help = `kvtier: a persistent KV-cache tier for LLM inference

  kvtier up [OPTIONS]      the whole system on this machine (kvtier up --help)
  kvtier demo [--json]     cold, warm and after SIGKILL: the same answers, a fraction of the time
  kvtier --version
`;

const commands: Readonly<Record<string, () => Promise<{ run(args: readonly string[]): Promise<number> }>>> = {
  up: () => import('./up.ts'),
  demo: () => import('./demo.ts'),
};

export async function main(args: readonly string[]): Promise<number> {
  return (await saidAtOnce(args)) ?? (await failing(() => runOf(args)));
}

/** Version, help, or why the words make no sense: the exit code, for which nothing native is loaded; undefined: the command has to run. */
export async function saidAtOnce([name, ...rest]: readonly string[]): Promise<number | undefined> {
  if (name === '-v' || name === '--version' || rest.includes('--version')) {
    process.stdout.write(`kvtier ${version}\n`);
    return 0;
  }
  if (name === undefined || name === '--help' || name === '-h' || name === 'help') {
    process.stdout.write(help);
    return name === undefined ? 1 : 0;
  }
  if (name !== 'up') return undefined;
  return await failing(async () => {
    if (parseUp(rest) !== null) return undefined;
    process.stdout.write(upHelp);
    return 0;
  });
}

async function runOf([name = '', ...rest]: readonly string[]): Promise<number> {
  const load = Object.hasOwn(commands, name) ? commands[name] : undefined;
  if (!load) {
    const near = nearest(name, Object.keys(commands));
    throw miswritten(`${name}: unknown command; ${near ? `did you mean kvtier ${near}?` : 'see kvtier --help'}`);
  }
  return await (await load()).run(rest);
}

async function failing<T>(run: () => Promise<T>): Promise<T | number> {
  try {
    return await run();
  } catch (error) {
    if (!(error instanceof KvError)) throw error; // a defect: its stack is wanted
    process.stderr.write(`kvtier: ${error.message}\n`);
    return exitCodeOf([error]);
  }
}
