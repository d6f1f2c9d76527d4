/** Envoy's ext_proc in front of Dispatch: which endpoint a gateway sends a request to. */
export { type EndpointPicker, type EndpointPickerOptions, startEndpointPicker } from './endpoint-picker.ts';
export type { BodyFacts, BodyReader } from './picker.ts';
