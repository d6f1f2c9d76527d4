/** `kvtier up`: starts the system, says how to use it, serves until SIGINT, SIGTERM, SIGHUP or until whoever launched it is gone. */
import { native } from '@kvtier/data-plane';
import { endProcess, stderrSink } from '@kvtier/telemetry';
import { formatBytes } from './bytes.ts';
import { humanLine, jsonLine } from './log-lines.ts';
import { parseUp, type UpOptions, upHelp } from './options.ts';
import { type System, startSystem } from './system.ts';

/** npm passes Ctrl-C on, so the first press may arrive twice; one that comes this much later is meant. */
const secondPressMs = 2_000;
/** Above what the supervisor gives its services: then this process goes, too, whatever hangs in it. */
const lastResortMs = 14_000;

export async function run(args: readonly string[]): Promise<number> {
  const options = parseUp(args);
  if (options === null) {
    process.stdout.write(upHelp);
    return 0;
  }
  if (options.check) return await check(options, args);
  const format = options.jsonLog ? jsonLine : humanLine;
  const say = (line: string): void => stderrSink().write(`${line}\n`);
  const stopped = stopSignal();
  const begin = performance.now();
  const interrupted = new AbortController();
  void stopped.first.then(() => interrupted.abort());
  const events = {
    onLine: (service: string, line: string) => say(format(service, line)),
    onEvent: (message: string) => say(options.jsonLog ? jsonLine('kvtier', message) : `kvtier: ${message}`),
  };
  process.stdout.on('error', () => {}); // whoever read it is gone
  const system = await startSystem(options, events, interrupted.signal).catch((error: unknown) => {
    endInTime();
    throw error;
  });
  process.stdout.write(greeting(system, performance.now() - begin, options));
  const lost = await Promise.race([stopped.first, system.lost]);
  stopped.onSecond = () => system.kill();
  if (lost) endInTime();
  await system.stop();
  if (lost) throw lost;
  endProcess(0); // not by an empty event loop: a call that hangs would keep it
  return 0;
}

async function check(options: UpOptions, args: readonly string[]): Promise<number> {
  const { lines, code } = await (await import('./check.ts')).checkSystem(options);
  for (const line of lines) process.stderr.write(`${line}\n`);
  if (lines.length > 0) return code;
  const rest = args.filter((arg) => arg !== '--check');
  process.stdout.write(`configuration is valid: ${['kvtier up', ...rest].join(' ')}\n`);
  return 0;
}

const endInTime = (): void =>
  native.killAfter(lastResortMs, `kvtier: not ended after ${lastResortMs / 1000} s; killed\n`);

function stopSignal(): { first: Promise<void>; onSecond: () => void } {
  let firstAt = 0;
  const state = { first: Promise.resolve(), onSecond: (): void => {} };
  state.first = new Promise((resolve) => {
    const onSignal = (): void => {
      if (firstAt === 0) {
        firstAt = performance.now();
        endInTime();
      } else if (performance.now() - firstAt > secondPressMs) state.onSecond();
      resolve();
    };
    process.on('SIGINT', onSignal);
    process.on('SIGTERM', onSignal);
    process.on('SIGHUP', onSignal);
    process.on('disconnect', onSignal); // whoever launched us is gone
    process.channel?.unref(); // and does not keep us
  });
  return state;
}

function greeting(system: System, elapsedMs: number, { tier, apiServer }: UpOptions): string {
  const disk = system.diskBytes === 0 ? 'no disk tier' : `disk tier up to ${formatBytes(system.diskBytes)}`;
  const { engines, prefillEngines: prefill, nodes } = system;
  const workers = prefill === 0 ? `${engines} engines` : `${prefill} prefill, ${engines - prefill} decode`;
  const several = engines > 1 ? `  members ${workers}, ${nodes} cache ${nodes === 1 ? 'node' : 'nodes'}\n` : '';
  const where = tier
    ? `  data   ${system.dataDir} (${disk}, arena ${formatBytes(system.arenaBytes)} in shared memory)\n`
    : '  data   none: running without a tier\n';
  return `
kvtier is up after ${(elapsedMs / 1000).toFixed(1)} s

  API server  ${system.url}/v1  (OpenAI-compatible; model "${system.model.name}")
${several}${where}  try    ${curlExample(system, apiServer.apiKeysFile != null)}

Ctrl-C stops it.
`;
}

/** One line to paste into a shell. The demo model answers look-ups in a table; any model continues it. */
function curlExample({ url, model }: System, asksKey: boolean): string {
  const prompt =
    '# Employees\n| 1 | John Doe | 29 | Engineer | Canada |\n| 2 | Jane Smith | 34 | Doctor | Brazil |\n' +
    'Question: What is the country of Jane Smith?\nAnswer:';
  const body = JSON.stringify({ model: model.name, prompt, max_tokens: 4, temperature: 0 });
  const key = asksKey ? "-H 'authorization: Bearer KEY' " : '';
  return `curl ${url}/v1/completions ${key}-H 'content-type: application/json' -d '${body}'`;
}
