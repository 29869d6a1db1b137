{{- /*
Patches of the EnvoyFilters. The HTTP filters are those of the files in envoy/, where comments give the reasons.

Names of the filters: "…ext_proc.kvmesh" differs from Istio's own filter, because routes refer to filters by name.
*/ -}}

{{- /* The proxies that get the patches. No upper bound: an installation keeps working while Istio is upgraded. */ -}}
{{- define "kvmesh.proxies" -}}
context: {{ eq .Values.mode "sidecar" | ternary "SIDECAR_OUTBOUND" "GATEWAY" }}
proxy:
  proxyVersion: '^1\.(2[8-9]|[3-9][0-9]|[1-9][0-9]{2}).*'
{{- end }}

{{- /* "true" if the pick's filter fails open only to avoid cutting responses in progress, else empty. */ -}}
{{- define "kvmesh.refusesUnpicked" -}}
{{- if and (eq (include "kvmesh.bodyMode" .) "buffered") (eq .Values.failureMode "FailClose") -}}
true
{{- end -}}
{{- end }}

{{- /* The patches of one filter chain: (dict "root" $ "port" PORT), PORT 0 or missing for all listeners. */ -}}
{{- define "kvmesh.filterPatches" -}}
{{- /* A later INSERT_FIRST comes before an earlier one. A response passes the chain in reverse. */ -}}
{{- $duplex := eq (include "kvmesh.bodyMode" .root) "duplex" -}}
{{- include "kvmesh.filterPatch" (dict "chain" . "filter" "kvmesh.pickFilter" "beforeRouter" true) }}
{{- if include "kvmesh.refusesUnpicked" .root }}
{{ include "kvmesh.filterPatch" (dict "chain" . "filter" "kvmesh.unpickedFilter" "beforeRouter" true) }}
{{- end }}
{{- if $duplex }}
{{ include "kvmesh.filterPatch" (dict "chain" . "filter" "kvmesh.noteFilter") }}
{{ include "kvmesh.filterPatch" (dict "chain" . "filter" "kvmesh.responseFilter") }}
{{- end }}
{{ include "kvmesh.filterPatch" (dict "chain" . "filter" "kvmesh.stripFilter") }}
{{- end }}

{{- define "kvmesh.filterPatch" -}}
- applyTo: HTTP_FILTER
  match:
    {{- include "kvmesh.proxies" .chain.root | nindent 4 }}
    listener:
      {{- with .chain.port }}
      portNumber: {{ . }}
      {{- end }}
      filterChain:
        filter:
          name: envoy.filters.network.http_connection_manager
          {{- if .beforeRouter }}
          subFilter: {name: envoy.filters.http.router}
          {{- end }}
  patch:
    operation: {{ hasKey . "beforeRouter" | ternary "INSERT_BEFORE" "INSERT_FIRST" }}
    value:
      {{- include .filter .chain.root | nindent 6 }}
{{- end }}

{{- /* Asks for an endpoint; disabled except on routes that enable it. */ -}}
{{- define "kvmesh.pickFilter" -}}
{{- $buffered := eq (include "kvmesh.bodyMode" .) "buffered" -}}
name: envoy.filters.http.ext_proc.kvmesh
disabled: true
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
  stat_prefix: kvmesh
  grpc_service:
    {{- include "kvmesh.pickerService" . | nindent 4 }}
  processing_mode:
    request_header_mode: SEND
    request_body_mode: {{ $buffered | ternary "BUFFERED" "FULL_DUPLEX_STREAMED" }}
    request_trailer_mode: SEND
    response_header_mode: SEND
    response_body_mode: NONE
    response_trailer_mode: SEND
  {{- if $buffered }}
  message_timeout: {{ add .Values.longestQueueSeconds 60 }}s # enforced for buffered bodies: exceeds the longest wait
  allow_mode_override: true # lets the picker request a response's body; not allowed with duplex
  {{- else }}
  message_timeout: 10s # with the default of 200 ms a short stall of the picker would lose a good answer
  {{- end }}
  failure_mode_allow: false # routes override it
  status_on_error: {code: ServiceUnavailable}
  request_attributes: [xds.cluster_name] # the pool drawn by a weighted route
  response_attributes: [upstream.address, response.code_details]
  metadata_options:
    receiving_namespaces:
      untyped: {{ $buffered | ternary (list "envoy.lb") (list "envoy.lb" "kvmesh") | toJson }}
    forwarding_namespaces:
      untyped: [envoy.lb, envoy.lb.subset_hint, envoy.filters.http.jwt_authn]
  {{- if eq .Values.routeSettings "keep" }}
  # for x-envoy-max-retries: requests with transfer parameters must not be retried, whatever the route says
  mutation_rules: {allow_envoy: true}
  {{- end }}
{{- end }}

{{- /* Rejects requests without a pick; disabled except on routes that enable it. */ -}}
{{- define "kvmesh.unpickedFilter" -}}
name: envoy.filters.http.fault.kvmesh
disabled: true
typed_config:
  {{- include "kvmesh.refuseUnpicked" . | nindent 2 }}
{{- end }}

{{- define "kvmesh.refuseUnpicked" -}}
"@type": type.googleapis.com/envoy.extensions.filters.http.fault.v3.HTTPFault
abort:
  http_status: 503
  percentage: {numerator: 100}
headers:
  - {name: x-gateway-destination-endpoint, present_match: true, invert_match: true}
{{- end }}

{{- /* Copies the pick's note, if any, to a header that the response filter can match; pods must not forge one. */ -}}
{{- define "kvmesh.noteFilter" -}}
name: kvmesh.note
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
  mutations:
    response_mutations:
      - remove: x-kvmesh-note
      - append:
          header: {key: x-kvmesh-note, value: "%DYNAMIC_METADATA(kvmesh:response)%"}
          append_action: OVERWRITE_IF_EXISTS_OR_ADD
{{- end }}

{{- /* Reads responses for which the pick left a note; others skip it. */ -}}
{{- define "kvmesh.responseFilter" -}}
name: envoy.filters.http.ext_proc.kvmesh-response
typed_config:
  "@type": type.googleapis.com/envoy.extensions.common.matching.v3.ExtensionWithMatcher
  xds_matcher:
    matcher_list:
      matchers:
        - predicate:
            and_matcher:
              predicate:
                # the one on :status is needed: without it the match is decided on request headers, which have no note
                - single_predicate:
                    {{- include "kvmesh.hasResponseHeader" (list "status" ":status") | nindent 20 }}
                - not_matcher:
                    single_predicate:
                      {{- include "kvmesh.hasResponseHeader" (list "note" "x-kvmesh-note") | nindent 22 }}
          on_match:
            action:
              name: skip
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.filters.common.matcher.action.v3.SkipFilter
  extension_config:
    name: envoy.filters.http.ext_proc
    typed_config:
      "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor
      stat_prefix: kvmesh_response
      grpc_service:
        {{- include "kvmesh.pickerService" . | nindent 8 }}
      processing_mode:
        request_header_mode: SKIP
        request_body_mode: NONE
        request_trailer_mode: SKIP
        response_header_mode: SEND
        response_body_mode: NONE
        response_trailer_mode: SEND
      allow_mode_override: true
      message_timeout: 10s
      failure_mode_allow: true # the response is already computed
      response_attributes: [upstream.address]
      metadata_options:
        receiving_namespaces: {untyped: [kvmesh]}
        forwarding_namespaces: {untyped: [kvmesh]}
{{- end }}

{{- define "kvmesh.hasResponseHeader" -}}
input:
  name: {{ first . }}
  typed_config:
    "@type": type.googleapis.com/envoy.type.matcher.v3.HttpResponseHeaderMatchInput
    header_name: {{ last . | quote }}
value_match:
  safe_regex: {google_re2: {}, regex: .+}
{{- end }}

{{- /* Removes clients' endpoint headers, because only the picker steers, and the note. */ -}}
{{- define "kvmesh.stripFilter" -}}
name: kvmesh.strip-client-headers
typed_config:
  "@type": type.googleapis.com/envoy.extensions.filters.http.header_mutation.v3.HeaderMutation
  mutations:
    request_mutations:
      - remove: x-gateway-destination-endpoint
      - remove: x-gateway-destination-endpoint-subset
      - remove: x-gateway-destination-endpoint-served
    response_mutations:
      - remove: x-kvmesh-note
{{- end }}

{{- /* Istio's own cluster of the picker (mTLS, no limit of 1024 requests), without a timeout for streams. */ -}}
{{- define "kvmesh.pickerService" -}}
envoy_grpc:
  cluster_name: outbound|9002||{{ include "kvmesh.pickerHost" . }}
  authority: {{ include "kvmesh.pickerHost" . }}
{{- end }}

{{- /* Sends a route's requests through the picker: (list $ POOL). */ -}}
{{- define "kvmesh.routePatch" -}}
{{- $root := first . -}}
{{- $refusesUnpicked := include "kvmesh.refusesUnpicked" $root -}}
{{- $longest := printf "%ds" (add $root.Values.longestQueueSeconds $root.Values.longestStreamSeconds) -}}
patch:
  operation: MERGE
  value:
    route:
      idle_timeout: {{ $longest }} # no byte flows while a request is queued
      {{- if eq $root.Values.routeSettings "replace" }}
      timeout: {{ $longest }}
      {{- end }}
      retry_policy:
        per_try_timeout: 0s # istiod replaces durations: a route's own timeout cannot cut a generation
        {{- if eq $root.Values.routeSettings "replace" }}
        retry_on: connect-failure,refused-stream,reset-before-request # safe: no pod has begun the request
        num_retries: 2 # walk the picker's list of at least three pods
        retry_back_off: {base_interval: 0.005s, max_interval: 0.05s}
        {{- end }}
    typed_per_filter_config:
      envoy.filters.http.ext_proc.kvmesh:
        "@type": type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute
        overrides:
          grpc_initial_metadata:
            - {key: x-kvmesh-pool, value: {{ (last .).identity }}}
          # with duplex bodies Envoy cuts responses in either case
          failure_mode_allow: {{ or (eq $root.Values.failureMode "FailOpen") (not (empty $refusesUnpicked)) }}
      {{- if $refusesUnpicked }}
      envoy.filters.http.fault.kvmesh:
        {{- include "kvmesh.refuseUnpicked" $root | nindent 8 }}
      {{- end }}
    # For Envoy's own responses; the picker sets it on those it sees. Envoy adds no header if the id is empty.
    response_headers_to_add:
      - header: {key: x-request-id, value: "%REQ(X-REQUEST-ID)%"}
        append_action: OVERWRITE_IF_EXISTS_OR_ADD
    request_body_buffer_limit: 67108864 # above the picker's own limits, which answer 413 in JSON
{{- end }}

{{- /* Lets the pick override a pool's load balancing: (list $ POOL). */ -}}
{{- define "kvmesh.poolClusterPatch" -}}
{{- $root := first . -}}
- applyTo: CLUSTER
  match:
    {{- include "kvmesh.proxies" $root | nindent 4 }}
    cluster: {service: {{ (last .).host }}, portNumber: {{ (last .).port }}}
  patch:
    operation: MERGE
    value:
      per_connection_buffer_limit_bytes: 33554432
      load_balancing_policy:
        policies:
          - typed_extension_config:
              name: envoy.load_balancing_policies.override_host
              typed_config:
                "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost
                # only metadata: clients can set headers, and with both sources each dead pod would be tried twice
                override_host_sources:
                  - metadata:
                      key: envoy.lb
                      path: [{key: x-gateway-destination-endpoint}]
                fallback_policy:
                  policies:
                    - typed_extension_config:
                        name: envoy.load_balancing_policies.least_request
                        typed_config:
                          "@type": type.googleapis.com/envoy.extensions.load_balancing_policies.least_request.v3.LeastRequest
                {{- if ge (include "kvmesh.istioMinor" $root | int) 30 }}
                selected_host_key:
                  key: envoy.lb
                  path: [{key: x-gateway-destination-endpoint-served}]
                {{- end }}
{{- end }}

{{- /* Keeps a client from breaking the shared connections to the picker. */ -}}
{{- define "kvmesh.pickerClusterPatch" -}}
- applyTo: CLUSTER
  match:
    {{- include "kvmesh.proxies" . | nindent 4 }}
    cluster: {service: {{ include "kvmesh.pickerHost" . }}, portNumber: 9002}
  patch:
    operation: MERGE
    value:
      typed_extension_protocol_options:
        # istiod replaces these as a whole, so those of the DestinationRule are repeated
        envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
          "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
          common_http_protocol_options: {idle_timeout: 3600s}
          explicit_http_config:
            http2_protocol_options:
              connection_keepalive: {interval: 30s, timeout: 20s}
              max_outbound_frames: 1000000
              max_outbound_control_frames: 10000
              max_concurrent_streams: 256
{{- end }}
