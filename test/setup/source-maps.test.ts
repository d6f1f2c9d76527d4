import { SourceMap, type SourceMapPayload } from 'node:module';
import { build } from 'esbuild';
import { expect, it } from 'vitest';

const script = new URL('../../scripts/lib/source-maps.mjs', import.meta.url).href;
const { linesOfOurs } = (await import(script)) as { linesOfOurs: (text: string) => Promise<string> };

it('what a map says of our lines stays as it was, once for each, and of packages it says nothing', async () => {
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
  const [whole, ours] = [outputFiles[0]!.text, await linesOfOurs(outputFiles[0]!.text)].map(
    (text) => new SourceMap(JSON.parse(text) as SourceMapPayload),
  );
  const where = (map: SourceMap, line: number, column: number): string => {
    const entry = map.findEntry(line, column);
    return 'originalSource' in entry && entry.originalSource !== undefined
      ? `${entry.originalSource}:${entry.originalLine}`
      : 'nowhere';
  };
  const segments = (JSON.parse(await linesOfOurs(outputFiles[0]!.text)) as SourceMapPayload).mappings
    .split(/[;,]/)
    .filter(Boolean);
  expect(segments.length).toBe(7);
  const told = new Set<string>();
  for (const [line, text] of outputFiles[1]!.text.split('\n').entries()) {
    for (let column = 0; column < text.length; column++) {
      const before = where(whole!, line, column);
      expect(where(ours!, line, column)).toBe(before.includes('node_modules/') ? 'nowhere' : before);
      told.add(before.replace(/:.*/, ''));
    }
  }
  expect([...told].sort()).toEqual(['b.ts', 'main.ts', 'node_modules/p.js', 'nowhere']);
});
