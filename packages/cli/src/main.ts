/** The `kvtier` command. `main` returns the exit code; every failure of the world is one line on stderr. */
import { KvError } from '@kvtier/errors';
import { nearest } from './options.ts';

const help = `kvtier: a persistent KV-cache tier for LLM inference

  kvtier up [OPTIONS]      the whole system on this machine (kvtier up --help)
  kvtier demo [--json]     cold, warm and after SIGKILL: the same answers, a fraction of the time
`;

const commands: Readonly<Record<string, () => Promise<{ run(args: readonly string[]): Promise<number> }>>> = {
  up: () => import('./up.ts'),
  demo: () => import('./demo.ts'),
};

export async function main(args: readonly string[]): Promise<number> {
  const [name, ...rest] = args;
  if (name === undefined || name === '--help' || name === '-h' || name === 'help') {
    process.stdout.write(help);
    return name === undefined ? 1 : 0;
  }
  try {
    const load = Object.hasOwn(commands, name) ? commands[name] : undefined;
    if (!load) {
      const near = nearest(name, Object.keys(commands));
      throw new KvError(
        'CONFIG',
        `kvtier ${name}: unknown command; ${near ? `did you mean kvtier ${near}?` : 'see kvtier --help'}`,
      );
    }
    return await (await load()).run(rest);
  } catch (error) {
    if (!(error instanceof KvError)) throw error; // a defect: its stack is wanted
    process.stderr.write(`kvtier: ${error.message}\n`);
    return 1;
  }
}
