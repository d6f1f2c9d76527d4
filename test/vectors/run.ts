/**
 * npm run vectors -- DIR: replay every recorded file below a folder and print, per file, how many operations are equal, and
 * the first that is not with what was expected. Exit code 0 only if all files are of a known format and all equal.
 */
import { readdirSync } from 'node:fs';
import { join } from 'node:path';
import { type HashFile, replayHashes } from './hashes.ts';
import { areRuns, type Difference, type ReplayReport, readRecorded, replayRuns } from './kv-cache-manager.ts';
import { areEventCases, replayEvents } from './kv-events.ts';

const usage = 'usage: npm run vectors -- DIR    replay the recorded runs (*.json, *.json.gz) in DIR\n';

export function main(args: readonly string[]): number {
  const [folder] = args;
  if (folder === undefined || args.length !== 1 || folder.startsWith('-')) {
    process.stderr.write(usage);
    return 2;
  }
  const files = readdirSync(folder, { recursive: true, encoding: 'utf8' })
    .filter((name) => /\.json(\.gz)?$/.test(name))
    .sort();
  let failed = files.length === 0 ? 1 : 0;
  const width = Math.max(...files.map((name) => name.length), 0);
  for (const name of files) {
    const report = replay(name, readRecorded(join(folder, name)));
    if (!report) {
      process.stdout.write(
        `${name.padEnd(width)}  not replayed: neither runs of a KV-cache manager, nor block hashes, nor KV events\n`,
      );
      failed++;
      continue;
    }
    const { equal, total, first } = report;
    process.stdout.write(`${name.padEnd(width)}  ${equal} / ${total} operations equal\n`);
    if (first) process.stdout.write(contextOf(first));
    if (equal !== total) failed++;
  }
  process.stdout.write(`${files.length - failed} of ${files.length} files equal\n`);
  return failed === 0 ? 0 : 1;
}

function replay(name: string, content: unknown): ReplayReport | undefined {
  if (areRuns(content)) return replayRuns(content);
  if (areEventCases(content)) return replayEvents(name, content);
  const isHashFile = typeof content === 'object' && content !== null && 'none_hash' in content && 'chains' in content;
  return isHashFile ? replayHashes(name, content as HashFile) : undefined;
}

function contextOf({ run, index, op, what, expected, actual }: Difference): string {
  const text = (value: unknown): string => (typeof value === 'string' ? value : JSON.stringify(value)).slice(0, 1200);
  return [
    `    ${run}, operation ${index}: ${op.slice(0, 400)}`,
    `    ${what} recorded: ${text(expected)}`,
    `    ${what} here:     ${text(actual)}`,
    '',
  ].join('\n');
}
