/** Files that could not be used are remembered as long as somebody looks at them. */
import { expect, it } from 'vitest';
import { refusedFiles, tellRenewed } from './renewed.ts';

const tell = tellRenewed({ info: () => {}, warn: () => {} }, 'keys');

/** Refused ones, that say how often they were asked whether they still are. */
const refused = () => {
  const files = {
    asked: 0,
    isClosed: false,
    get isRefused(): boolean {
      files.asked++;
      return !files.isClosed;
    },
  };
  tell('bad', files);
  return files;
};

it.each([
  ['the next that are told of', () => void refused()],
  ['the next count', () => void refusedFiles()],
])('those that are closed while refused are let go with %s', (_, next) => {
  const before = refusedFiles();
  const files = refused();
  expect(refusedFiles()).toBe(before + 1);
  files.isClosed = true;
  next();
  files.asked = 0;
  refusedFiles();
  tell(undefined);
  expect(files.asked).toBe(0);
});
