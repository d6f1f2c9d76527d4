import { availableParallelism } from 'node:os';
import { defineConfig } from 'vitest/config';

// Two projects: `quick` is what `npm run check` runs; `slow` starts processes, fills disks, kills things.
// Real servers, real deaths and random schedules on two busy cores: whoever needs a second attempt is named at the end of
// `npm test`, and is a defect to mend.
// A property that found a counterexample gets none (test/setup/properties.ts).
// A worker runs one file after another in one process: modules are loaded once, and no test changes any.
const common = {
  testTimeout: 30_000,
  hookTimeout: 60_000,
  pool: 'forks' as const,
  isolate: false,
  retry: 1,
  setupFiles: ['test/setup/properties.ts', 'test/setup/turns.ts', 'test/setup/costs.ts'],
};
export default defineConfig({
  test: {
    projects: [
      {
        test: {
          ...common,
          name: 'quick',
          maxWorkers: availableParallelism(),
          sequence: { groupOrder: 0 },
          include: ['{packages,services,bench,test}/**/*.test.ts'],
          exclude: ['**/*.slow.test.ts', '**/node_modules/**'],
        },
      },
      {
        test: {
          ...common,
          name: 'slow',
          globalSetup: ['scripts/lib/programs.mjs'],
          testTimeout: 240_000,
          include: ['{packages,services,bench,test}/**/*.slow.test.ts'],
          exclude: ['**/node_modules/**'],
          // Two at a time: they mostly wait for servers, deaths and starts.
          maxWorkers: 2,
          sequence: { groupOrder: 1 },
        },
      },
    ],
  },
});
