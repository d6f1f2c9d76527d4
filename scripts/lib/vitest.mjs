/**
 * Runs vitest and returns what happened as counts, read from its JSON report, so that the closing line never depends on how a
 * reporter words itself.
 */
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join, relative } from 'node:path';
import { stripVTControlCharacters } from 'node:util';
import { foreground, root } from './command.mjs';

/**
 * @param {readonly string[]} projects
 * @param {readonly string[]} args further arguments for vitest: paths, -t NAME
 * @returns {Promise<{code: number, passed: number, failed: number, skipped: string[], flaky: string[], failures: string[]}>} `flaky`: passed
 *   only at their second attempt; `failures`: a line for each test, or file, that failed
 */
export async function runVitest(projects, args) {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-test-'));
  try {
    const report = join(folder, 'report.json');
    const flakyReport = join(folder, 'flaky');
    const command = [
      join(root, 'node_modules/vitest/vitest.mjs'),
      'run',
      ...projects.flatMap((project) => ['--project', project]),
      '--reporter=default',
      '--reporter=json',
      `--reporter=${join(root, 'scripts/lib/flaky-reporter.mjs')}`,
      `--outputFile.json=${report}`,
      ...args,
    ];
    const env = { ...process.env, KVTIER_FLAKY_REPORT: flakyReport };
    const code = await foreground(process.execPath, command, { env });
    const flaky = existsSync(flakyReport) ? readFileSync(flakyReport, 'utf8').trim().split('\n') : [];
    const counts = { code, passed: 0, failed: 0, skipped: [], flaky, failures: [] };
    let files;
    try {
      files = JSON.parse(readFileSync(report, 'utf8')).testResults;
    } catch {
      return { ...counts, code: code || 1 }; // it broke before it could report; its own output says why
    }
    for (const file of files) countInto(counts, file);
    return counts;
  } finally {
    rmSync(folder, { recursive: true, force: true });
  }
}

/** Adds one file of vitest's JSON report. A file fails without a test that does when it cannot be loaded, or a hook of its own fails. */
export function countInto(counts, file) {
  const failedBefore = counts.failed;
  for (const test of file.assertionResults) {
    if (test.status === 'passed') counts.passed += 1;
    else if (test.status === 'failed') fail(counts, file, test.fullName, test.failureMessages?.[0]);
    else counts.skipped.push(test.fullName);
  }
  if (file.status === 'failed' && counts.failed === failedBefore) fail(counts, file, 'the file itself', file.message);
}

function fail(counts, file, what, why = '') {
  counts.failed += 1;
  const reason = stripVTControlCharacters(why).trim().split('\n', 1)[0].slice(0, 300);
  counts.failures.push(`${relative(root, file.name)} > ${what}${reason === '' ? '' : `: ${reason}`}`);
}

/**
 * Arguments for vitest that select in one folder: names of files come first, and mean those of the folder; without any it is all
 * of it.
 * @param {string} folder
 * @param {readonly string[]} args
 */
export function within(folder, args) {
  const options = args.findIndex((arg) => arg.startsWith('-'));
  const names = options < 0 ? args : args.slice(0, options);
  const files = names.map((name) => (name.startsWith(`${folder}/`) ? name : `${folder}/${name}`));
  return [...(files.length > 0 ? files : [folder]), ...args.slice(names.length)];
}

/** Prints what was skipped, flaky or failed, where it is found last, and as the very last line the counts that CI reads. */
export function closingLine({ passed, failed, skipped, flaky, failures = [] }) {
  for (const name of skipped) process.stdout.write(`skipped: ${name}\n`);
  for (const name of flaky) process.stdout.write(`FLAKY, a defect to mend: ${name}\n`);
  for (const line of failures) process.stdout.write(`FAILED  ${line}\n`);
  process.stdout.write(`${passed} passed, ${failed} failed, ${skipped.length} skipped\n`);
}
