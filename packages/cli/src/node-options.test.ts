import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { parseUp } from './options.ts';

const folder = mkdtempSync(join(tmpdir(), 'kvtier-node-options-'));
afterAll(() => rmSync(folder, { recursive: true }));
const fileOf = (name: string, value: unknown): string => {
  const file = join(folder, name);
  writeFileSync(file, typeof value === 'string' ? value : JSON.stringify(value));
  return file;
};
const nodeOf = (...args: string[]) => parseUp(args)!.node;

it('lays shared tiers and a file over what kvtier up makes', () => {
  expect(nodeOf()).toEqual({});
  expect(nodeOf('--redis', 'redis://10.0.0.5:6379')).toEqual({
    redis: { servers: ['redis://10.0.0.5:6379'], bytes: 2 ** 30 },
  });
  expect(nodeOf('--s3', 'https://s3.example:9000/kv-blocks', '--s3-bytes', '2g')).toEqual({
    s3: { endpoint: 'https://s3.example:9000', bucket: 'kv-blocks', bytes: 2 ** 31 },
  });
  const file = fileOf('a.json', { placement: { redis: { codec: 'lz4' } } });
  expect(nodeOf('--node-config', file, '--redis', 'unix:/run/redis.sock', '--redis-bytes', '64MiB')).toEqual({
    placement: { redis: { codec: 'lz4' } },
    redis: { servers: ['unix:/run/redis.sock'], bytes: 64 * 2 ** 20 },
  });
});

it('names a group by its number or name', () => {
  expect(nodeOf('--group', '2000')).toEqual({ group: 2000 });
  expect(nodeOf('--group', 'kv')).toEqual({ group: 'kv' });
});

it.each<[string, () => string[], RegExp]>([
  ['no group', () => ['--group', 'a:b'], /^--group: "a:b" is no group; write its name or number$/],
  ['two groups', () => ['--group', '1', '--node-config', fileOf('g', { group: 2 })], /^--group: the file of/],
  ['another scheme', () => ['--redis', 'http://x'], /^--redis: write redis:/],
  [
    'a password in the command line',
    () => ['--redis', 'redis://:pw@x:1'],
    /^--redis: write redis:.*password goes into the file/,
  ],
  ['bytes of nothing', () => ['--redis-bytes', '1g'], /^--redis-bytes: goes with --redis/],
  ['a bucket of nothing', () => ['--s3-bytes', '1g'], /^--s3-bytes: goes with --s3/],
  ['no bucket', () => ['--s3', 'https://x:1'], /^--s3: "https:\/\/x:1" is no place of a bucket/],
  ['too little', () => ['--redis', 'redis://x:1', '--redis-bytes', '1'], /^--redis-bytes: "1" is too little/],
  ['no file', () => ['--node-config', join(folder, 'none')], /^--node-config: .*none cannot be read \(ENOENT/],
  ['no JSON', () => ['--node-config', fileOf('b', '{')], /^--node-config: .*b: not valid JSON/],
  ['no object', () => ['--node-config', fileOf('c', '[]')], /^--node-config: .*c is no JSON object/],
  [
    'what up sets',
    () => ['--node-config', fileOf('d', { disk: null })],
    /^--node-config: .*kvtier up sets "disk" itself/,
  ],
  [
    'a key that nobody knows',
    () => ['--node-config', fileOf('f', { placment: {} })],
    /^--node-config: \S*f: unknown key "placment"; did you mean "placement"\?$/,
  ],
  [
    'a tier that is not there',
    () => ['--disk-bytes', '0', '--node-config', fileOf('h', { placement: { disk: {} } })],
    /^--node-config: \S*h: placement\.disk: there is no disk tier/,
  ],
  [
    'what a file lacks',
    () => ['--s3', 'https://x:1/kv-blocks', '--node-config', fileOf('i', { redis: { bytes: 1 << 20 } })],
    /^--node-config: \S*i: redis\.servers: is required$/,
  ],
  [
    'a name that no bucket has',
    () => ['--s3', 'https://x:1/Kv_Blocks'],
    /^--s3: s3\.bucket: write the name of a bucket/,
  ],
  ['twice', () => ['--node-config', fileOf('e', { redis: {} }), '--redis', 'redis://x:1'], /^--redis: the file/],
  ['without a node', () => ['--no-tier', '--redis', 'redis://x:1'], /^--redis: there is no cache node with --no-tier/],
])('refuses %s in one line', (_what, args, message) => {
  expect(() => parseUp(args())).toThrow(message);
  expect(() => parseUp(args())).toThrow(/^[^\n]*$/);
});
