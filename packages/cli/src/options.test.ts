import { readFileSync } from 'node:fs';
import { engineWorkerSchema } from '@kvtier/config';
import { describe, expect, it } from 'vitest';
import { formatBytes, parseBytes } from './bytes.ts';
import { parseUp, upHelp } from './options.ts';

const evictionPolicies = engineWorkerSchema.shape.evictionPolicy.unwrap().options;

describe('byte counts', () => {
  it.each([
    ['1GiB', 2 ** 30],
    ['1g', 2 ** 30],
    ['512 MiB', 512 * 2 ** 20],
    ['1.5KB', 1536],
    ['4096', 4096],
    ['2T', 2 ** 41],
  ])('reads %s', (text, bytes) => expect(parseBytes(text, '--x')).toBe(bytes));

  it.each(['', 'GiB', '-1', '1 PiB', '1e3', '99999999999999999999'])('refuses "%s"', (text) =>
    expect(() => parseBytes(text, '--arena-bytes')).toThrow(
      `--arena-bytes: "${text}" is not a number of bytes; write for example 512MiB or 2GiB`,
    ),
  );

  it('refuses less than what is needed', () =>
    expect(() => parseBytes('0', '--arena-bytes')).toThrow('--arena-bytes: "0" is too little; ask for 1 B or more'));

  it('writes them for a person', () => {
    expect([2 ** 30, 1.5 * 2 ** 30, 64 * 2 ** 20, 2048, 17].map(formatBytes)).toEqual([
      '1 GiB',
      '1.5 GiB',
      '64 MiB',
      '2 KiB',
      '17 B',
    ]);
  });
});

describe('kvtier up', () => {
  it('has the options of docs/operating.md, and no others', () => {
    const page = readFileSync(new URL('../../../docs/operating.md', import.meta.url), 'utf8');
    const cells = [...page.matchAll(/^\| (`--[^|]*)\|/gm)].map((match) => match[1]!);
    const documented = cells.flatMap((cell) => [...cell.matchAll(/--[a-z0-9-]+/g)].map(([name]) => name));
    const told = [...upHelp.matchAll(/^ {2}(--[a-z0-9-]+)/gm)].map((match) => match[1]!);
    expect(documented.toSorted()).toEqual(told.filter((name) => name !== '--help').toSorted());
  });

  it('has embedded defaults', () => {
    expect(parseUp([])).toMatchObject({
      port: 8000,
      model: 'demo',
      tier: true,
      engines: 1,
      prefillEngines: 0,
      nodes: 1,
      arenaBytes: null,
      diskBytes: null,
      kvBytes: null,
      backend: 'auto',
      gpu: {},
      threads: null,
      maxStepTokens: null,
      loads: 'planned',
      prefixCache: 'blocks',
      evictionPolicy: null,
      dedupBlocks: false,
      maxPinnedBlocks: 0,
      jsonLog: false,
      logLevel: 'warn',
    });
  });

  it('takes every option', () => {
    const args =
      '--port 0 --data-dir /d --model random:25m --no-tier --engines 4 --arena-bytes 1m --disk-bytes=1g --kv-bytes 2m --threads 2 --max-step-tokens 8192 --prefix-cache blocks --eviction s3-fifo --dedup --pinned-blocks 64 --loads always --json-log';
    expect(parseUp(args.split(' '))).toEqual({
      port: 0,
      apiServer: { host: '127.0.0.1', tls: null, apiKeysFile: null, adminKeysFile: null, trustedNetwork: false },
      dataDir: '/d',
      model: 'random:25m',
      tier: false,
      engines: 4,
      prefillEngines: 0,
      nodes: 0,
      arenaBytes: 2 ** 20,
      diskBytes: 2 ** 30,
      kvBytes: 2 ** 21,
      backend: 'auto',
      gpu: {},
      threads: 2,
      maxStepTokens: 8192,
      loads: 'always',
      prefixCache: 'blocks',
      evictionPolicy: 's3-fifo',
      dedupBlocks: true,
      maxPinnedBlocks: 64,
      node: {},
      jsonLog: true,
      logLevel: 'info',
    });
  });

  it('takes the radix tree, and refuses with it what hashed blocks alone have', () => {
    expect(parseUp(['--prefix-cache', 'radix'])).toMatchObject({ prefixCache: 'radix', dedupBlocks: false });
    for (const option of [['--dedup'], ['--eviction', 'lru'], ['--pinned-blocks', '1']])
      expect(() => parseUp(['--prefix-cache', 'radix', ...option])).toThrow(
        `${option[0]}: an option of hashed blocks; use --prefix-cache blocks or leave it out`,
      );
  });

  it('counts prefill and decode workers, each with a node of its own unless it is told otherwise', () => {
    const counts = (...args: string[]): unknown => {
      const { engines, prefillEngines, nodes } = parseUp(args)!;
      return [engines, prefillEngines, nodes];
    };
    expect(counts('--prefill', '1', '--decode', '2')).toEqual([3, 1, 3]);
    expect(counts('--prefill', '2', '--decode', '2', '--nodes', '1')).toEqual([4, 2, 1]);
    expect(counts('--prefill', '20', '--decode', '20')).toEqual([40, 20, 16]);
  });

  it('says how much a tier needs at least', () =>
    expect(() => parseUp(['--disk-bytes', '1'])).toThrow('--disk-bytes: "1" is too little; ask for 8 MiB or more'));

  it('takes 0 for no disk tier', () => expect(parseUp(['--disk-bytes', '0'])).toMatchObject({ diskBytes: 0 }));

  it('answers --help with null', () => expect(parseUp(['--help'])).toBeNull());

  it.each([
    [['--prot', '1'], '--prot: unknown option; did you mean --port?'],
    [['--data', 'x'], '--data: unknown option; did you mean --data-dir?'],
    [['--frobnicate'], '--frobnicate: unknown option; see kvtier up --help'],
    [['--toString'], '--toString: unknown option; see kvtier up --help'],
    [['-x'], '-x: unknown option; see kvtier up --help'],
    [['--data-dir', ''], '--data-dir: names no folder; name one, or leave it out'],
    [['--data-dir', import.meta.filename], `--data-dir: ${import.meta.filename} is a file; name a folder`],
    [['--port', '70000'], '--port: "70000" is not a whole number from 0 to 65535'],
    [['--port', '80x'], '--port: "80x" is not a whole number from 0 to 65535'],
    [['--max-step-tokens', '8'], '--max-step-tokens: "8" is not a whole number from 16 to 65536'],
    [['--threads', '0'], '--threads: "0" is not a whole number from 1 to 1024'],
    [['--log-level', 'loud'], '--log-level: "loud" is not one of trace, debug, info, warn, error, silent'],
    [['--eviction', 'random'], `--eviction: "random" is not one of ${evictionPolicies.join(', ')}`],
    [['--pinned-blocks', '-1'], "Option '--pinned-blocks' argument is ambiguous"],
    [['--engines', '65'], '--engines: "65" is not a whole number from 1 to 64'],
    [
      ['--engines', '2', '--nodes', '3'],
      '--nodes: 3 nodes are more than engines (2); ask for 2 or fewer, or for more engines',
    ],
    [
      ['--prefill', '1', '--decode', '1', '--engines', '2'],
      '--prefill: the workers are counted by --prefill and --decode; drop --engines',
    ],
    [
      ['--decode', '1', '--engines', '2'],
      '--decode: the workers are counted by --prefill and --decode; drop --engines',
    ],
    [['--prefill', '1'], '--prefill: prefill and decode apart need both; say --decode as well'],
    [['--decode', '1'], '--decode: prefill and decode apart need both; say --prefill as well'],
    [
      ['--prefill', '1', '--decode', '1', '--no-tier'],
      '--prefill: blocks are handed over by cache nodes; drop --no-tier',
    ],
    [['--prefill', '0', '--decode', '1'], '--prefill: "0" is not a whole number from 1 to 63'],
    [['--prefill', '60', '--decode', '5'], '--decode: "5" is not a whole number from 1 to 4'],
    [['--no-tier', '--nodes', '1'], '--nodes: there is no cache node with --no-tier; drop one'],
    [['demo'], 'kvtier up: "demo" is not an option; see kvtier up --help'],
  ])('refuses %j in one line', (args, message) => expect(() => parseUp(args)).toThrow(message));

  it('refuses an option without its value in one line', () => {
    expect(() => parseUp(['--port'])).toThrow(/^Option '--port <value>' argument missing; see kvtier up --help$/);
  });
});
