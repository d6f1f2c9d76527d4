import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { codes, InvariantError, invariant, KvError, type KvErrorCode } from './index.ts';

describe('KvError', () => {
  it('carries code, retry, tier and cause', () => {
    const cause = new Error('errno 28');
    const error = new KvError('IO', '/data: no space left; free some', { retry: true, tier: 'disk', cause });
    expect(error).toMatchObject({ name: 'KvError', code: 'IO', retry: true, tier: 'disk', cause });
    expect(error.message).toBe('/data: no space left; free some');
    expect(new KvError('IO', 'x')).toMatchObject({ retry: false, tier: undefined });
    expect('cause' in new KvError('IO', 'x')).toBe(false);
  });

  it('is made from what native code throws: "CODE: message"', () => {
    const all = Object.keys(codes) as KvErrorCode[];
    fc.assert(
      fc.property(fc.constantFrom(...all), fc.string(), (code, message) => {
        const thrown = new Error(`${code}: ${message}`);
        expect(KvError.from(thrown)).toMatchObject({ code, message, cause: thrown });
      }),
    );
  });

  it('keeps a KvError as it is, and gives anything else the fallback code', () => {
    const error = new KvError('BUSY', 'full');
    expect(KvError.from(error, 'IO')).toBe(error);
    expect(KvError.from(new Error('ENOENT: no such file'), 'MODEL')).toMatchObject({
      code: 'MODEL',
      message: 'ENOENT: no such file',
    });
    expect(KvError.from('text')).toMatchObject({ code: 'IO', message: 'text' });
  });
});

describe('invariant', () => {
  it('passes what holds without building its message', () => {
    invariant(true, () => {
      throw new Error('built');
    });
  });

  it.each([0, '', null, undefined, false])('throws for %j', (value) => {
    expect(() => invariant(value, 'slot is free')).toThrow(new InvariantError('slot is free'));
    expect(() => invariant(value, () => 'built late')).toThrow('built late');
  });
});
