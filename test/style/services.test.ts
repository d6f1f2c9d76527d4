/** What surrounds the services says the same of them: version, exit codes, pages. */
import { serviceHelp } from '@kvtier/telemetry/testing';
import { version } from '@kvtier/telemetry/version';
import { expect, it } from 'vitest';
import { filesBelow, packages, read, services } from './tree.ts';

it('one version, that of package.json', () => {
  const folders = ['.', 'bench', 'test', ...[...packages, ...services].map(({ folder }) => folder)];
  const others = folders
    .map((folder) => [folder, (JSON.parse(read(`${folder}/package.json`)) as { version: string }).version] as const)
    .filter(([, its]) => its !== version);
  expect(others, 'make packages/base/telemetry/src/version.ts and all package.json equal').toEqual([]);
});

it('a configuration that cannot work is told by one exit code', () => {
  const code = /const configExitCode = (\d+);/.exec(read('packages/base/errors/src/exit-code.ts'))![1]!;
  for (const unit of filesBelow('infra/systemd', ['.service']))
    expect(read(unit).split('\n'), unit).toContain(`RestartPreventExitStatus=${code}`);
  const pages = [
    'docs/errors.md',
    'docs/cache-node.md',
    'docs/engine-worker.md',
    'docs/coordinator.md',
    'docs/operating.md',
  ];
  expect(pages.filter((page) => !new RegExp(`\\b${code}\\b`).test(read(page)))).toEqual([]);
});

it('the page that a service’s --help names begins with its name', () => {
  for (const { folder } of services) {
    const name = folder.split('/')[1]!;
    const page = /docs\/[\w-]+\.md/.exec(serviceHelp(name))![0];
    expect(read(page).toLowerCase()).toMatch(new RegExp(`^# the ${name.replace('-', ' ')}`));
  }
});
