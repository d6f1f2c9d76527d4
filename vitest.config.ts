import { availableParallelism } from 'node:os';
import { defineConfig } from 'vitest/config';
import { BaseSequencer, type TestSpecification } from 'vitest/node';
import { placeOf } from './test/setup/longest.ts';

// Three projects: `quick` is what `npm run check` runs; `slow` starts processes, fills disks, kills things; `long` (`npm run test:long`) looks
// at much for minutes: surveys, mutations, sanitizers, other compilers.
// Real servers, real deaths and random schedules on two busy cores: whoever needs a second attempt is named at the end of
// `npm test`, and is a defect to mend.
// A property that found a counterexample gets none (test/setup/properties.ts).
// A worker runs one file after another in one process: modules are loaded once, and no test changes any.

/** Two more than there are cores: tests wait for servers, deaths and starts for half of their time. */
const workers = availableParallelism() + 2;

const common = {
  testTimeout: 30_000,
  hookTimeout: 60_000,
  pool: 'forks' as const,
  isolate: false,
  retry: 1,
  expect: { poll: { timeout: 20_000 } },
  setupFiles: ['test/setup/properties.ts', 'test/setup/turns.ts', 'test/setup/costs.ts'],
};

/** vitest knows what takes long only where it ran before; in a fresh checkout it goes by the size of files, and what runs Python is a small one. */
class LongestFirst extends BaseSequencer {
  override async sort(files: TestSpecification[]): Promise<TestSpecification[]> {
    const group = ({ project }: TestSpecification): number => project.config.sequence.groupOrder;
    const sorted = await super.sort(files);
    return sorted.sort((a, b) => group(a) - group(b) || placeOf(a.moduleId) - placeOf(b.moduleId));
  }
}

export default defineConfig({
  test: {
    sequence: { sequencer: LongestFirst },
    projects: [
      {
        test: {
          ...common,
          name: 'quick',
          maxWorkers: workers,
          sequence: { groupOrder: 0 },
          include: ['{packages,services,bench,test}/**/*.test.ts'],
          exclude: ['**/*.{slow,long}.test.ts', '**/node_modules/**'],
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
          maxWorkers: workers,
          sequence: { groupOrder: 1 },
        },
      },
      {
        test: {
          ...common,
          name: 'long',
          globalSetup: ['scripts/lib/programs.mjs'],
          testTimeout: 900_000,
          include: ['{packages,services,bench,test}/**/*.long.test.ts'],
          exclude: ['**/node_modules/**'],
          maxWorkers: 2,
          sequence: { groupOrder: 2 },
        },
      },
    ],
  },
});
