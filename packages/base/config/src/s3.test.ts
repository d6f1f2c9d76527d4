import { describe, expect, it } from 'vitest';
import { parseConfig } from './index.ts';
import { s3Schema } from './s3.ts';

const least = { bucket: 'kv-blocks', bytes: 2 ** 30 };

it('has defaults for all but bucket and bytes', () => {
  expect(parseConfig(s3Schema, least, 'test')).toEqual({
    ...least,
    region: 'us-east-1',
    prefix: 'kvtier/',
    reloadMs: 10_000,
    packBytes: 33 << 20,
    connections: 16,
    timeLimitMs: 15_000,
    idleLimitMs: 5_000,
    flushMs: 100,
    refreshMs: 10_000,
    maxBlocks: 4_194_304,
  });
});

describe('refuses in one line, with its path', () => {
  it.each([
    [{ ...least, bucket: 'Kv_Blocks' }, /^test: bucket: write the name of a bucket/],
    [{ ...least, endpoint: 'localhost:7480' }, /^test: endpoint: write https:\/\/host:port/],
    [{ ...least, endpoint: 'http://user:secret@host' }, /^test: endpoint: /],
    [{ ...least, bytes: 2 ** 24 }, /^test: bytes: holds not one pack/],
    [{ ...least, prefix: '/x' }, /^test: prefix: /],
    [{ ...least, accessKeyId: 'a' }, /^test: accessKeyId: give it with/],
    [{ ...least, secretAccessKeyFile: '/s' }, /^test: accessKeyId: give it with/],
    [{ ...least, accessKeyId: 'a', secretAccessKey: 'b', secretAccessKeyFile: '/s' }, /^test: secretAccessKeyFile: /],
    [
      { ...least, accessKeyId: 'a', secretAccessKey: 'b', credentialsFile: '/c' },
      /^test: credentialsFile: give it, or accessKeyId/,
    ],
    [{ ...least, sessionToken: 'a', credentialsFile: '/c' }, /^test: credentialsFile: give it, or accessKeyId/],
    [{ ...least, profile: 'kv' }, /^test: profile: is one of a credentialsFile/],
    [{ ...least, credentialsFile: '/c', profile: 'a b' }, /^test: profile: write the name/],
    [{ ...least, colour: 1 }, /^test: top level: .*colour/],
  ])('%j', (value, message) => {
    expect(() => parseConfig(s3Schema, value, 'test')).toThrow(message);
  });
});
