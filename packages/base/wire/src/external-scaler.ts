/** KEDA's protocol for scalers of others: the generated messages, server and client. */
export {
  ExternalScalerClient,
  type ExternalScalerServer,
  ExternalScalerService,
  type GetMetricSpecResponse,
  type GetMetricsRequest,
  type GetMetricsResponse,
  type IsActiveResponse,
  type ScaledObjectRef,
} from './generated/externalscaler/externalscaler.ts';
