{{/* Rules that several NetworkPolicies share. */}}

{{- define "paceline.metricsIngress" -}}
- from:
    {{- range .Values.networkPolicy.metricsNamespaces }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ . | quote }}
    {{- else }}
    - namespaceSelector: {}
    {{- end }}
  ports:
    - {port: 9400, protocol: TCP}
{{- end -}}

{{/* Takes cidrs and ports. */}}
{{- define "paceline.cidrEgress" -}}
{{- if and .cidrs .ports -}}
- to:
    {{- range .cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    {{- range .ports }}
    - {port: {{ . }}, protocol: TCP}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* Names, and where models come from. */}}
{{- define "paceline.modelEgress" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- with include "paceline.cidrEgress" .Values.networkPolicy.egress.modelHub }}
{{ . }}
{{- end }}
{{- end -}}
