/** What docs and comments say of files and names is so. */
import { existsSync } from 'node:fs';
import { dirname, join } from 'node:path';
import { cacheNodeSchema, engineWorkerSchema } from '@kvtier/config';
import { admissionNames, blockPolicyNames, policyNames } from '@kvtier/eviction';
import { codecNames } from '@kvtier/tiers';
import { expect, it } from 'vitest';
import { codesIn, tableRows } from './docs.ts';
import { filesBelow, packages, read, root, services, workspace } from './tree.ts';

const code = ['packages', 'services', 'bench', 'test', 'scripts', 'proto', 'infra'].flatMap((folder) =>
  filesBelow(folder, ['.ts', '.mjs', '.cc', '.h', '.cu', '.cuh', '.py', '.proto', '.sh', '.txt']),
);
const pages = [
  ...['README.md', 'ARCHITECTURE.md', 'CONTRIBUTING.md'],
  ...['docs', 'infra', 'bench', 'models', 'packages'].flatMap((folder) => filesBelow(folder, ['.md'])),
];
const tree = [...code, ...pages, ...filesBelow('models', ['.py', '.md', '.json']), ...filesBelow('infra', ['.json'])];

/** Comments of a source file, or the whole of a page: [line number, text]. */
function prose(path: string): [number, string][] {
  const lines = read(path).split('\n');
  const isComment = (line: string): boolean =>
    /^\s*(\*|\/\*|\/\/|#(?!include|define|pragma|if|end|else))|\s\/\/ /.test(line);
  return lines.flatMap((line, at) =>
    path.endsWith('.md') || isComment(line) ? [[at + 1, line] as [number, string]] : [],
  );
}

const comment = (line: string): string => line.replace(/^(?!\s*[*/#]).*?\s\/\/ /, '');

it('files named in docs and comments exist', () => {
  // Programs and libraries of others, what users and models bring, and what the set-up makes.
  const others = /^(?:build|vllm|sglang|lib|benches)\/|^xxhash\.h$|^[A-Z]+\.\w+$|\/[A-Z]+\.ts$/;
  const ends = new Set(tree.map((path) => path.split('/').at(-1)!));
  const missing = [...code, ...pages].flatMap((path) =>
    prose(path).flatMap(([line, text]) =>
      [
        ...comment(text).matchAll(
          /(?<![\w/@.$}*-])((?:[\w-]+\/)*[\w.-]+\.(?:ts|mjs|cc|h|cu|cuh|md|sh|proto))(?![\w*/])/g,
        ),
      ]
        .map((match) => match[1]!)
        .filter((name) => !others.test(name) && !/^https?:/.test(name))
        .filter((name) => {
          if (/^(packages|services|bench|test|scripts|proto|infra|docs|models)\//.test(name))
            return !existsSync(join(root, name));
          if (!name.includes('/')) return !ends.has(name);
          return !tree.some((file) => file.endsWith(`/${name}`)) && !existsSync(join(root, dirname(path), name));
        })
        .map((name) => `${path}:${line}: ${name}`),
    ),
  );
  expect(missing, 'name the file as it is called now').toEqual([]);
});

it('folders named in docs and comments exist', () => {
  const missing = [...code, ...pages].flatMap((path) =>
    prose(path).flatMap(([line, text]) =>
      [...comment(text).matchAll(/(?<![\w/@.-])((?:packages|services)(?:\/[a-z][\w-]*)+)(?![\w.*/-])/g)]
        .map((match) => match[1]!)
        .filter((name) => !existsSync(join(root, name)))
        .map((name) => `${path}:${line}: ${name}`),
    ),
  );
  expect(missing, 'name the folder as it is called now').toEqual([]);
});

it('packages named anywhere exist, also where no compiler looks', () => {
  const names = new Set([...packages, ...services, workspace('bench'), workspace('test')].map(({ name }) => name));
  const missing = [...code, ...pages].flatMap((path) =>
    [...read(path).matchAll(/@kvtier\/[a-z][\w-]*/g)]
      .filter(([name]) => !names.has(name))
      .map(([name]) => `${path}: ${name}`),
  );
  expect(missing, 'name the package as it is called now').toEqual([]);
});

it('links of pages lead somewhere', () => {
  const missing = pages.flatMap((path) =>
    [...read(path).matchAll(/\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)/g)]
      .map((match) => match[1]!)
      .filter((to) => !existsSync(join(root, dirname(path), to)))
      .map((to) => `${path}: ${to}`),
  );
  expect(missing).toEqual([]);
});

it('no word of how the work was done, no path outside of the repository', () => {
  // Spelled so that this file does not match itself.
  const words = [
    'the blue~print',
    'the re~port\\b',
    'issue \\d',
    'issues? of (?:its|their) own',
    'engine issue~',
    '(?:third|fourth|fifth|sixth|seventh|eighth|ninth|tenth) sess~ion',
    'is le~nt for',
    '/wo~rk/',
    '(?<!npm run )\\bshared/(?:seeds|vectors|traces|reference|design)',
    'platform\\.m~d',
  ].map((word) => new RegExp(word.replace('~', '')));
  const found = [...code, ...pages]
    .filter((path) => path !== 'test/style/sentences.test.ts')
    .flatMap((path) =>
      read(path)
        .split('\n')
        .flatMap((line, at) =>
          words.filter((word) => word.test(line)).map((word) => `${path}:${at + 1}: ${word.source}`),
        ),
    );
  expect(found, 'speak of the product, and of what is here').toEqual([]);
});

it('pages keep to 120 columns outside of tables and code', () => {
  const long = pages.flatMap((path) => {
    let isCode = false;
    return read(path)
      .split('\n')
      .flatMap((line, at) => {
        if (line.startsWith('```')) isCode = !isCode;
        return isCode || /^(\||#| {4}|.*https?:)/.test(line) || line.length <= 120 ? [] : [`${path}:${at + 1}`];
      });
  });
  expect(long).toEqual([]);
});

it('entries of docs/decisions.md have at most 80 words', () => {
  const entries = read('docs/decisions.md').split(/\n\* /).slice(1);
  const long = entries
    .map((entry) => entry.split('\n\n')[0]!.split(/\s+/).filter(Boolean))
    .filter((words) => words.length > 80)
    .map((words) => `${words.length} words: ${words.slice(0, 6).join(' ')}`);
  expect(entries.length).toBeGreaterThan(30);
  expect(long).toEqual([]);
});

it('rows of the map are short: at most five files, the others stand at the head of their room', () => {
  const rows = read('ARCHITECTURE.md')
    .split('\n')
    .filter((line) => line.startsWith('| `'));
  expect(rows.length).toBeGreaterThan(30);
  const files = (row: string): string[] => codesIn(row).filter((code) => /\.(?!json$)\w+$/.test(code));
  const long = rows.filter((row) => row.length > 300 || files(row).length > 5);
  expect(long, 'name what to start with; the rest goes to the head of its entry').toEqual([]);
  const missing = packages
    .map(({ folder }) => folder.replace('packages/', ''))
    .filter((room) => !rows.some((row) => row.includes(`\`${room}\``)));
  expect(missing, 'a room without a row').toEqual([]);
});

it('each report of docs/lessons.md has its test, or is said to be a limit', () => {
  const open = tableRows('docs/lessons.md').filter((row) => row.some((cell) => /\bnot yet\b/.test(cell)));
  expect(open, 'name the test that keeps it away, or say what the limit is').toEqual([]);
});

it('the first pages stay short', () => {
  const limits = { 'README.md': 120, 'ARCHITECTURE.md': 150 };
  const lines = Object.keys(limits).map((page) => [page, read(page).split('\n').length - 1] as const);
  expect(lines.filter(([page, count]) => count > limits[page as keyof typeof limits])).toEqual([]);
});

it('names of policies, admissions, codecs and tiers in the configuration are those of their sources', () => {
  const config = read('packages/base/config/src/cache-node.ts');
  const engine = read('packages/base/config/src/index.ts');
  const lists = (text: string): string[][] =>
    [...text.matchAll(/\[((?:\s*'[\w+-]+',?)+)\s*\]/g)].map((match) =>
      [...match[1]!.matchAll(/'([^']+)'/g)].map((name) => name[1]!),
    );
  const has = (text: string, names: readonly string[]): boolean =>
    lists(text).some((list) => list.toSorted().join() === [...names].toSorted().join());
  expect(has(config, policyNames), 'policyNames of packages/base/eviction').toBe(true);
  expect(has(config, admissionNames), 'admissionNames of packages/base/eviction').toBe(true);
  expect(has(config, codecNames), 'codecNames of packages/store/tiers').toBe(true);
  expect(has(engine, blockPolicyNames), 'blockPolicyNames of packages/base/eviction').toBe(true);
  const row = (page: string, key: string): string[] =>
    codesIn(
      tableRows(page)
        .find(([first]) => first === `\`${key}\``)!
        .at(-1)!,
    );
  expect(row('docs/cache-node.md', '.eviction').toSorted()).toEqual(policyNames.toSorted());
  expect(row('docs/operating.md', 'evictionPolicy').toSorted()).toEqual(blockPolicyNames.toSorted());
  const tiers = filesBelow('packages/store/tiers/src', ['-tier.ts'])
    .flatMap((path) => [...read(path).matchAll(/^ {2}readonly name = '(\w+)'/gm)].map((match) => match[1]!))
    .toSorted();
  // Placement is for what is written down to: not the arena, where blocks come from, nor the peers, who write themselves.
  expect(
    has(
      config,
      tiers.filter((name) => name !== 'arena' && name !== 'peer'),
    ),
    'names of the tiers',
  ).toBe(true);
  expect(codesIn(/^\* \*\*tier\*\*:[^*]*/m.exec(read('docs/glossary.md'))![0]).toSorted()).toEqual(tiers);
  expect(/fastest first: ([\w, ]+)\./.exec(read('docs/cache-node.md'))![1]!.split(', ').toSorted()).toEqual(tiers);
});

it('headings of pages that docs and comments name exist', () => {
  const missing = [...code, ...pages].flatMap((path) =>
    [...read(path).matchAll(/(docs\/[\w-]+\.md)(?:, | \()"([^"\n]+)"/g)]
      .filter(([, page, heading]) => !new RegExp(`^#+ ${heading}$`, 'm').test(read(page!)))
      .map(([all]) => `${path}: ${all}`),
  );
  expect(missing, 'name the heading as it is called now').toEqual([]);
});

it('write-down waits for the disk as long as docs and configuration say', () => {
  const ms = Number(/diskSettleMs = ([\d_]+)/.exec(read('packages/store/node/src/node.ts'))![1]!.replaceAll('_', ''));
  expect(read('docs/cache-node.md')).toContain(`| \`.TIER.settleMs\` | ${ms} for \`disk\`, else 0 |`);
  expect(read('packages/base/config/src/cache-node.ts')).toContain(`Absent: ${ms} for the disk, 0 for tiers`);
});

it('defaults of docs/cache-node.md are those of the schema', () => {
  const least = {
    ...{ socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 30 }, disk: { bytes: 1 << 30 } },
    peers: { security: { encryption: 'none', secretFile: '/secret' }, peers: [{ host: '127.0.0.1', port: 1 }] },
    s3: { bucket: 'blocks', bytes: 1 << 30 },
    placement: { disk: {} },
  };
  const parsed = cacheNodeSchema.parse(least) as unknown as Record<string, unknown>;
  const disk = (parsed.placement as { disk: object }).disk;
  const wrong: string[] = [];
  let at: unknown = parsed;
  for (const [first, second] of tableRows('docs/cache-node.md')) {
    const keys = codesIn(first!);
    if (first!.startsWith('**') && /\*\*`(\w+)`\*\*/.test(first!)) at = parsed[/\*\*`(\w+)`\*\*/.exec(first!)![1]!];
    for (const [i, raw] of keys.entries()) {
      const key = raw.replace(/^\.(TIER\.)?/, '');
      const holder = /^\.TIER\./.test(raw)
        ? disk
        : raw.startsWith('.')
          ? at
          : first!.startsWith('**')
            ? parsed
            : parsed;
      const values = [parsed.s3, holder].map((one) => (one as Record<string, unknown> | null)?.[key]);
      const value = raw.startsWith('.') || first!.startsWith('**') ? values[1] : (values[0] ?? values[1]);
      const told = second!.split(', ')[i] ?? second!;
      const literal = /^`([^`]*)`$|^(\d+|true|false)$/.exec(told);
      if (literal === null || value === undefined || typeof value === 'object') continue;
      if (String(value) !== (literal[1] ?? literal[2]))
        wrong.push(`${raw}: ${told} in the docs, ${String(value)} in the schema`);
    }
  }
  expect(wrong).toEqual([]);
});

it('defaults of docs/operating.md are those of the schemas', () => {
  const node = cacheNodeSchema.parse({
    ...{ socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 30 }, disk: null },
    redis: { servers: ['redis://h:1'], bytes: 1 << 30 },
    kvEvents: { endpoint: 'ipc:///e' },
  });
  const engine = engineWorkerSchema.parse({
    ...{ modelDir: '/m', servedName: 'm', listen: '127.0.0.1:1', cacheNodeSocket: null },
  });
  const byKey: Record<string, unknown> = { ...engine, ...node.kvEvents, ...node.redis };
  const asTold = (value: unknown): string =>
    value === '' ? 'empty' : value === null || value === undefined || isEmpty(value) ? 'none' : String(value);
  const isEmpty = (value: unknown): boolean => typeof value === 'object' && Object.keys(value as object).length === 0;
  const known = new Set([...Object.keys(engineWorkerSchema.shape), ...Object.keys(byKey)]);
  const compared = tableRows('docs/operating.md').flatMap(([first, second]) => {
    const keys = codesIn(first!).filter((key) => known.has(key));
    const told = second!.replaceAll('`', '').split(', ');
    return keys
      .map((key, at) => [key, keys.length === 1 ? told[0]! : (told[at] ?? '')] as const)
      .filter(([key, value]) => value !== '' && !(byKey[key] === undefined && value !== 'none'))
      .map(([key, value]) => [
        key,
        value.replace(/^(\d+) MiB$/, (_, n) => String(Number(n) * 2 ** 20)),
        asTold(byKey[key]),
      ]);
  });
  expect(compared.length).toBeGreaterThan(15);
  expect(compared.filter(([, told, is]) => told !== is)).toEqual([]);
});
