import { defineConfig } from 'vitest/config';

// Two projects: `quick` is what `npm run check` runs; `slow` starts processes, fills disks, kills things.
// Real servers, real deaths and random schedules on two busy cores: whoever needs a second attempt is named at the end of
// `npm test`, and is a defect to mend.
const common = { testTimeout: 30_000, hookTimeout: 60_000, pool: 'forks' as const, retry: 1 };
export default defineConfig({
  test: {
    projects: [
      {
        test: {
          ...common,
          name: 'quick',
          include: ['{packages,services,bench,test}/**/*.test.ts'],
          exclude: ['**/*.slow.test.ts', '**/node_modules/**'],
        },
      },
      {
        test: {
          ...common,
          name: 'slow',
          testTimeout: 240_000,
          include: ['{packages,services,bench,test}/**/*.slow.test.ts'],
          exclude: ['**/node_modules/**'],
          fileParallelism: false,
        },
      },
    ],
  },
});
