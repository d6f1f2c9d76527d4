import { SourceMap, type SourceMapPayload } from 'node:module';
import { SourceLines } from '@kvtier/telemetry/testing';
import { build } from 'esbuild';
import { expect, it } from 'vitest';

const script = new URL('../../scripts/lib/source-maps.mjs', import.meta.url).href;
const { linesOfOurs } = (await import(script)) as {
  linesOfOurs: (text: string, from: string, to: string) => Promise<Buffer>;
};

it('what a map says of our lines the table says, once for each, and of packages it says nothing', async () => {
  const files: Record<string, string> = {
    'main.ts': "import { a } from './node_modules/p.js';\nimport { b } from './b.ts';\nexport const sum = a + b;\n",
    'node_modules/p.js': 'const inner = 1;\nexport const a = inner + 1;\n',
    'b.ts': 'const before = 5;\nexport const b = Math.max(before * 2, 1)\n  .toFixed(\n    before,\n  ).length;\n',
  };
  const virtual = {
    name: 'virtual',
    setup({ onResolve, onLoad }: import('esbuild').PluginBuild): void {
      onResolve({ filter: /./ }, ({ path }) => ({ path: `/virtual/${path.replace('./', '')}` }));
      onLoad({ filter: /./ }, ({ path }) => ({ contents: files[path.slice('/virtual/'.length)]!, loader: 'ts' }));
    },
  };
  const { outputFiles } = await build({
    ...{ entryPoints: ['main.ts'], bundle: true, format: 'esm', sourcemap: 'linked', outdir: '/virtual', write: false },
    plugins: [virtual],
  });
  const whole = new SourceMap(JSON.parse(outputFiles[0]!.text) as SourceMapPayload);
  const table = await linesOfOurs(outputFiles[0]!.text, '/virtual', '/virtual/shared');
  const ours = new SourceLines(table);
  const before = (line: number, column: number): string => {
    const entry = whole.findEntry(line, column);
    return 'originalSource' in entry && entry.originalSource !== undefined
      ? `../${entry.originalSource}:${entry.originalLine}`
      : 'nowhere';
  };
  const after = (line: number, column: number): string => {
    const place = ours.find(line, column);
    return place === undefined ? 'nowhere' : `${place.source}:${place.line}`;
  };
  const length = 7 * 5 * 4;
  expect(table.readUInt32LE(table.length - 4)).toBe(length);
  expect(JSON.parse(table.toString('utf8', length, table.length - 4)).sort()).toEqual(['../b.ts', '../main.ts']);
  const told = new Set<string>();
  for (const [line, text] of outputFiles[1]!.text.split('\n').entries()) {
    for (let column = 0; column < text.length; column++) {
      const where = before(line, column);
      expect(after(line, column)).toBe(where.includes('node_modules/') ? 'nowhere' : where);
      told.add(where.replace(/:.*/, ''));
    }
  }
  expect([...told].sort()).toEqual(['../b.ts', '../main.ts', '../node_modules/p.js', 'nowhere']);
});
