/** What a file of shared secrets holds. */
import { expect, it } from 'vitest';
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
