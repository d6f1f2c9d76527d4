/**
 * Slow test files that wait for nothing: they keep a CPU busy from their first moment to their last, and how fast is not asked. `npm test`
 * runs them beside all others and behind them (nice), so that they take what the others leave while these wait for servers, deaths
 * and starts, and take nothing from tests that watch the time.
 */
export const computing = [
  ...['apart', 'churn', 'defects', 'goodput', 'handoff', 'sim'].map((name) => `test/sim/${name}.slow.test.ts`),
  ...['cuda-kernels', 'cuda-spills'].map((name) => `packages/engine/executor/src/${name}.slow.test.ts`),
  'packages/base/data-plane/src/identity.slow.test.ts',
];

const lanes = {
  computing: { include: computing, exclude: [] },
  waiting: { include: ['{packages,services,bench,test}/**/*.slow.test.ts'], exclude: computing },
  all: { include: ['{packages,services,bench,test}/**/*.slow.test.ts'], exclude: [] },
} as const;

/** Of slow tests, the files of a lane of KVTIER_TEST_LANE; without one, all. */
export function filesOf(lane: string | undefined): { readonly include: string[]; readonly exclude: string[] } {
  const { include, exclude } = lanes[(lane || 'all') as keyof typeof lanes];
  return { include: [...include], exclude: [...exclude] };
}
