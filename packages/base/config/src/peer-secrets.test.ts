/** What a file of shared secrets holds. */
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, onTestFinished } from 'vitest';
import { secretsIn } from './peer-secrets.ts';

const [one, two, three] = ['1', '2', '3'].map((digit) => digit.repeat(40));
const binary = Buffer.from(Array.from({ length: 48 }, (_, i) => (i === 20 ? 10 : 0x80 + i)));

it.each<[string, string | Buffer, readonly (string | Buffer)[]]>([
  ['one', `${one}\n`, [`${one}\n`, one!]],
  ['one, of a mounted file', one!, [one!, `${one}\n`]],
  ['two, the new one first', `${one}\n${two}\n`, [`${one}\n`, one!, `${two}\n`, two!]],
  ['two, of a mounted file', `${one}\n${two}`, [one!, `${one}\n`, two!, `${two}\n`]],
  ['one of three lines', `${one}\n${two}\n${three}\n`, [`${one}\n${two}\n${three}\n`, `${one}\n${two}\n${three}`]],
  ['one of any bytes', binary, [binary, Buffer.concat([binary, Buffer.of(10)])]],
  ['one as short as may be', `${'x'.repeat(31)}\n`, [`${'x'.repeat(31)}\n`, 'x'.repeat(31)]],
])('%s', (_, text, secrets) => {
  expect(secretsIn(Buffer.from(text as string))).toEqual(secrets.map((secret) => Buffer.from(secret as string)));
});

it.each([
  ['nothing', ''],
  ['too little', 'x'.repeat(31)],
  ['too little in its second line', `${one}\nshort\n`],
  ['too little in its first line', `short\n${one}\n`],
])('%s is none', (_, text) => {
  expect(() => secretsIn(Buffer.from(text))).toThrow('a secret has at least 32 bytes');
});

const [beginning, end] = ["**The peers' secret.**", '## Versions'];
const page = readFileSync(new URL('../../../../docs/rolling.md', import.meta.url), 'utf8');
const told = page.slice(page.indexOf(beginning!), page.indexOf(end!));
const commands = [...told.matchAll(/^ +```\n(.+?)\n +```$/gms)].map(([, command]) => command!);

it.each([
  ['a line break at their ends', '\n', '\n'],
  ['none, as Kubernetes mounts them', '', ''],
  ['one of both kinds', '', '\n'],
  ['one of both kinds, the other way', '\n', ''],
])('is changed by what docs/rolling.md says, of files with %s', (_, oldEnd, newEnd) => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-secrets-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const secret = join(folder, 'secret');
  writeFileSync(secret, `${one}${oldEnd}`, { mode: 0o640 });
  writeFileSync(join(folder, 'new'), `${two}${newEnd}`);
  const firsts = commands.map((command) => {
    execFileSync('sh', ['-c', command], { cwd: folder });
    const all = secretsIn(readFileSync(secret)).map(String);
    return { secrets: all.map((each) => each.trimEnd()), mode: statSync(secret).mode & 0o777 };
  });
  expect(firsts).toEqual([
    { secrets: [two, two, one, one], mode: 0o640 },
    { secrets: [two, two], mode: 0o640 },
  ]);
  expect(readdirSync(folder).toSorted()).toEqual(['new', 'secret']);
});
