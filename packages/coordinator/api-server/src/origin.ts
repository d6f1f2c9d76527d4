/** Web pages are not answered (`originProblem` of packages/base/wire); what they are told. */
import type { IncomingHttpHeaders } from 'node:http';
import { originProblem } from '@kvtier/wire/http';
import { HttpError } from './errors.ts';

/** Decides on the head alone, before a body is read. @throws HttpError 403 */
export function checkOrigin(headers: IncomingHttpHeaders, isLocal: boolean, scheme: 'http' | 'https'): void {
  const problem = originProblem(headers, isLocal, scheme);
  if (problem === undefined) return;
  throw new HttpError(403, problem.message, { code: problem.code, type: 'permission_error' });
}
